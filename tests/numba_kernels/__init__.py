"""Kernels in Numba, against their references."""
