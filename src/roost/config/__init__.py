"""Configuration: what the engine can be told, and every number that follows from it."""
