"""4-bit weights: whole numbers in groups with a scale, and a zero point where the format has one.

Activations stay bfloat16 (W4A16). Made by the readers of checkpoints (`weights.int4_formats`), or from floats at load:
each group is rounded to the nearest of 16 steps from its least weight to its largest, or to zero. Called by
`layers.linear`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from roost.layers.grouped import GroupedMatrix, concatenate, pack
from roost.layers.quantised import QuantisedWeight

_GROUP_LENS = (128, 64, 32)  # the first that divides a matrix's inputs
_STEPS = 15
_SCALE_LEAST = 1e-8  # of a group of equal weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Weight(QuantisedWeight):
    """4-bit values in groups."""

    form: ClassVar[str] = "int4"

    matrix: GroupedMatrix

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.matrix.values.shape[0], self.matrix.values.shape[1]

    def dequantise(self) -> Tensor:
        """The floats that it stands for."""
        return self.matrix.dequantise()

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self | None:
        """One matrix of several; None where their groups differ."""
        matrix = concatenate([each.matrix for each in weights])
        return None if matrix is None else cls(matrix=matrix)

    def linear(self, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The projection by a kernel that reads the 4-bit values."""
        from roost.kernels.grouped_linear import GroupedLinear  # noqa: PLC0415 (Triton is only there where GPUs are)

        return GroupedLinear(pack(self.matrix), bias)


def quantise(weight: Tensor) -> Int4Weight:
    """A matrix of floats in 4 bits: groups of 128 inputs, or of the largest size that divides them."""
    out_len, in_len = weight.shape
    group_len = next((length for length in _GROUP_LENS if in_len % length == 0), in_len)
    groups = weight.float().view(out_len, -1, group_len)
    low, high = groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)
    scales = ((high - low) / _STEPS).clamp_(min=_SCALE_LEAST).to(torch.bfloat16)  # rounded first, as they are kept
    zeros = (-low / scales).round_().clamp_(0, _STEPS)
    return Int4Weight(
        matrix=GroupedMatrix(
            values=(groups / scales).round_().add_(zeros).clamp_(0, _STEPS).to(torch.uint8).view(out_len, in_len),
            scales=scales.squeeze(-1),
            zeros=zeros.squeeze(-1).to(torch.uint8),
        )
    )
