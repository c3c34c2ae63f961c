"""Models: weights and forward passes over a flat batch of tokens; no pages, rows or requests."""
