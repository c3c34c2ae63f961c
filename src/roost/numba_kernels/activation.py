"""Activations of gates, and soft caps of logits, lane by lane.

Either activation is x / (1 + exp(-u)): of silu u is x, of gelu, which is approximated with a tanh, a polynomial of it.
A cap is cap * tanh(x / cap) = cap - 2 cap / (exp(2 x / cap) + 1). Called by the products and by rows.
"""

import math

import numpy as np
from numba import njit

from roost.numba_kernels.simd import add, div, exp2, fma, minimum, mul, or_no_number, splat_float, sub

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


@njit(nogil=True, inline="always")
def capped(x, cap):
    """16 numbers held below a cap; what is no number stays none."""
    slope = np.float32(2 * _LOG2_E) / cap
    power = exp2(minimum(mul(x, splat_float(slope)), splat_float(_POWER_MAX)))
    below = div(splat_float(np.float32(2.0) * cap), add(splat_float(1.0), power))
    return or_no_number(x, sub(splat_float(cap), below))
