"""Activations of gates, lane by lane.

Either is x / (1 + exp(-u)): of silu u is x, of gelu, which is approximated with a tanh, a polynomial of it. Called by
the products and by rows.
"""

import math

from numba import njit

from roost.numba_kernels.simd import add, div, exp2, fma, minimum, mul, splat_float

SILU, GELU_TANH = range(2)

_LOG2_E = math.log2(math.e)
_GELU_CUBE, _GELU_SLOPE = 0.044715, 2 * math.sqrt(2 / math.pi)
_POWER_MAX = 126.0  # of two: what is divided by more is zero


@njit(nogil=True, inline="always")
def activated(x, activation):
    """The activation of 16 numbers."""
    u = x
    if activation == GELU_TANH:  # 1 + tanh(v) = 2 / (1 + exp(-2 v))
        cubic = fma(mul(mul(x, x), splat_float(_GELU_CUBE)), x, x)
        u = mul(cubic, splat_float(_GELU_SLOPE))
    power = exp2(minimum(mul(u, splat_float(-_LOG2_E)), splat_float(_POWER_MAX)))
    return div(x, add(splat_float(1.0), power))
