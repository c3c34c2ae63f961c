"""Weights: checkpoints on disk, from a Hugging Face folder to a model in memory."""
