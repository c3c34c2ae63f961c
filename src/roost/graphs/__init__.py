"""CUDA graphs of whole steps: captured at a few sizes, replayed."""
