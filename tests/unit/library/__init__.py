"""The engine as a library."""
