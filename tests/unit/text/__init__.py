"""Tokens, text, stop strings and templates, on vocabularies small enough to read."""
