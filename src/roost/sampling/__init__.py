"""Sampling: a request's parameters, and the way from logits to tokens and log-probabilities."""
