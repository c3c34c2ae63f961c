"""Kernels against their torch references, at shapes that are no multiples of any tile."""
