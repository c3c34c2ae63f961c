"""Tests of the server's parts."""
