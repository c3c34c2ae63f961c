"""Doubles, builders and references that tests share. Nothing here is a test."""
