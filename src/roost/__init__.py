"""Roost: an LLM serving engine for conversations."""

__version__ = "0.1.0"
