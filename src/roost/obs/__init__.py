"""Observation: what the engine tells about itself; never changes what it does."""
