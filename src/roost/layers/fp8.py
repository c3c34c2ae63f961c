"""FP8 weights: e4m3 numbers with a scale for each output, or for each block of outputs and inputs.

w = scale * value, so y = x @ w.T. On a GPU the products are `kernels.fp8_linear`'s; elsewhere by the floats that they
stand for, which is the reference. Tokens may be rounded to e4m3 as well, each with a scale of its own
(`round_tokens`). Made by the readers of checkpoints, or from floats at load; called by `layers.linear`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from roost.layers.quantised import QuantisedWeight
from roost.lazy_import import load_symbol

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest e4m3 number
SCALE_LEAST = 1e-12  # of a row of zeros
_ROWS_AT_ONCE = 8192  # of a matrix that is rounded, so that its floats need little memory
_KERNEL = "roost.kernels.fp8_linear:make_projection"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Weight(QuantisedWeight):
    """e4m3 values, and what each block of them is multiplied by."""

    form: ClassVar[str] = "fp8"

    values: Tensor  # [out_len, in_len], e4m3
    scales: Tensor  # [ceil(out_len / rows), ceil(in_len / columns)], float32
    block: tuple[int, int]  # rows and columns that share a scale; (1, in_len): a scale for each output
    rounds_tokens: bool = True  # activations may be e4m3, too; False: the checkpoint has quantised weights alone

    def __post_init__(self) -> None:
        rows, columns = self.block
        expected = (-(-self.values.shape[0] // rows), -(-self.values.shape[1] // columns))
        assert self.values.dtype == FP8 and self.scales.dtype == torch.float32, (self.values.dtype, self.scales.dtype)
        assert tuple(self.scales.shape) == expected, (self.scales.shape, expected)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def is_per_channel(self) -> bool:
        """Whether each output has one scale."""
        return self.block == (1, self.shape[1])

    def dequantise(self) -> Tensor:
        """The floats that it stands for."""
        (out_len, in_len), (rows, columns) = self.shape, self.block
        scales = self.scales if rows == 1 else self.scales.repeat_interleave(rows, 0)[:out_len]
        return self.values.float() * (scales if columns == in_len else scales.repeat_interleave(columns, 1)[:, :in_len])

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self | None:
        """One matrix of several; blocks that would straddle two of them are cut into rows."""
        if len({each.rounds_tokens for each in weights}) > 1 or len({each.block[1] for each in weights}) > 1:
            return None
        rows = weights[0].block[0]
        if any(each.block[0] != rows or each.shape[0] % rows for each in weights):
            weights = [each._by_rows() for each in weights]
        return replace(
            weights[0],
            values=torch.cat([each.values for each in weights]),
            scales=torch.cat([each.scales for each in weights]),
        )

    def _by_rows(self) -> Self:
        """The same with a scale for each row of a block."""
        rows, columns = self.block
        scales = self.scales.repeat_interleave(rows, 0)[: self.shape[0]]
        return replace(self, scales=scales, block=(1, columns))

    def linear(self, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The projection: a kernel's on a GPU, by the floats that it stands for elsewhere."""
        added = None if bias is None else bias.to(torch.bfloat16)
        if self.values.device.type == "cpu":
            return partial(linear, weight=self.dequantise().to(torch.bfloat16), bias=added)
        projection: Callable[[Tensor], Tensor] = load_symbol(_KERNEL)(self, added)
        return projection


def quantise(weight: Tensor) -> Fp8Weight:
    """The nearest e4m3 numbers to a matrix, with a scale for each output."""
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scales = torch.empty((len(weight), 1), dtype=torch.float32, device=weight.device)
    parts = (each.split(_ROWS_AT_ONCE) for each in (weight, values, scales))
    for floats, own_values, own_scales in zip(*parts, strict=True):
        rounded, found = round_tokens(floats)
        own_values.copy_(rounded)
        own_scales.copy_(found)
    return Fp8Weight(values=values, scales=scales, block=(1, weight.shape[1]))


def round_tokens(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 numbers [num_rows, row_len] and a float32 scale for each [num_rows, 1]."""
    wide = hidden.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp_(min=SCALE_LEAST) / FP8_MAX
    return (wide / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scales
