"""Learned times of steps."""
