"""Placement against a plain model of who holds what."""
