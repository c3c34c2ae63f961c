"""CPU kernels in Numba: SIMD vectors, a team of threads, and the operations of a step."""
