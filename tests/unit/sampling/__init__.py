"""Sampling: parameters, the way from logits to tokens, log-probabilities."""
