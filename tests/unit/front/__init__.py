"""Unit tests of the front end."""
