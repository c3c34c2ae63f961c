"""Parity: ours equals Hugging Face, paged equals dense, depth 0 equals depth 1; on tiny random checkpoints."""
