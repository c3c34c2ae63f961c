"""The token record."""
