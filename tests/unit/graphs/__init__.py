"""CUDA graphs: their sizes."""
