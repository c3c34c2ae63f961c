"""Weights: folders that are whole, and all the ways in which they are not."""
