"""The gate of a feed-forward: activation(gate) * up.

silu(g) = g * sigmoid(g); gelu_tanh(g) = g * sigmoid(2u) with u = sqrt(2 / pi) * (g + 0.044715 * g^3), since
(1 + tanh(u)) / 2 = sigmoid(2u). clamped_swiglu is g * sigmoid(1.702 * g) * (u + 1) of a gate and an up that end at 7.
In float32, rounded once. Reads both halves of [num_tokens, 2 * width] once and writes half as much. Gate and up may lie
apart. The reference is in `layers.ops`. Called by models.
"""

import triton
import triton.language as tl
from torch import Tensor

from roost.layers.ops import CLAMP_ALPHA, CLAMP_LIMIT, CLAMPED

_BLOCK = 1024
ACTIVATION_CODES = {None: 0, "silu": 1, "gelu_pytorch_tanh": 2, CLAMPED: 3}  # as kernels know them
_LIMIT, _ALPHA = tl.constexpr(CLAMP_LIMIT), tl.constexpr(CLAMP_ALPHA)


def gate_up(both: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """activation(gate) * up [num_tokens, width] of gate and up side by side."""
    assert both.shape[1] % 2 == 0
    gate, up = both.chunk(2, dim=1)
    return gate_by(gate, up, activation, out=out)


def gate_by(gate: Tensor, up: Tensor, activation: str, *, out: Tensor | None = None) -> Tensor:
    """activation(gate) * up [num_tokens, width] of two that lie anywhere."""
    assert gate.shape == up.shape and gate.stride(1) == up.stride(1) == 1
    num_tokens, width = gate.shape
    output = gate.new_empty((num_tokens, width)) if out is None else out
    assert output.is_contiguous()
    if num_tokens:
        _gate_by[(num_tokens, triton.cdiv(width, _BLOCK))](
            *(gate, up, output, gate.stride(0), up.stride(0)),
            WIDTH=width,
            ACTIVATION=ACTIVATION_CODES[activation],
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return output


@triton.jit
def _gate_by(
    gates, ups, output, gate_stride, up_stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < WIDTH
    gate = tl.load(gates + token * gate_stride + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(ups + token * up_stride + column, mask=is_in, other=0.0).to(tl.float32)
    product = gated(gate, up, ACTIVATION)
    tl.store(output + token * WIDTH + column, product.to(output.dtype.element_ty), mask=is_in)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """The activation of a gate, in float32."""
    bent = gate if ACTIVATION == 1 else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-bent))


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """A gate and what it lets through, in float32."""
    if ACTIVATION == 3:
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        product = gate / (1.0 + tl.exp(gate * -_ALPHA)) * up
    else:
        product = activated(gate, ACTIVATION) * up
    return product
