"""Roost: an LLM serving engine for conversations."""

__all__ = ["__version__"]
__version__ = "0.1.0"
