"""Layers by themselves."""
