"""Benchmarks: each has a command of its own; none is a test."""
