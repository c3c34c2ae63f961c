"""CUDA graphs of whole steps: captured at a few sizes at start-up, then replayed."""
