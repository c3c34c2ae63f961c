"""4-bit weights: whole numbers in groups with a scale, and a zero point where the format has one.

Activations stay bfloat16 (W4A16). Made by the readers of checkpoints (`weights.int4_formats`), or from floats at load:
each group is rounded to the nearest of 16 steps, over the range whose squared error is least of a few. Called by
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
_SHRINKS = (0.95, 0.9, 0.85, 0.8, 0.75)  # parts of a group's range that are tried beside the whole
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
    scales, zeros = _range(low, high)
    least = _error(groups, scales, zeros)
    for shrink in _SHRINKS:
        tried = _range(low * shrink, high * shrink)
        error = _error(groups, *tried)
        is_less = error < least
        scales, zeros = (torch.where(is_less, new, old) for new, old in zip(tried, (scales, zeros), strict=True))
        least = torch.where(is_less, error, least)
    return Int4Weight(
        matrix=GroupedMatrix(
            values=_rounded(groups, scales, zeros).to(torch.uint8).view(out_len, in_len),
            scales=scales.squeeze(-1).to(torch.bfloat16),
            zeros=zeros.squeeze(-1).to(torch.uint8),
        )
    )


def _range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of groups that reach from `low` to `high`, the scale as it is kept."""
    scales = ((high - low) / _STEPS).clamp_(min=_SCALE_LEAST).to(torch.bfloat16).float()
    return scales, (-low / scales).round_().clamp_(0, _STEPS)


def _rounded(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (groups / scales).round_().add_(zeros).clamp_(0, _STEPS)


def _error(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The squared error of each group."""
    return _rounded(groups, scales, zeros).sub_(zeros).mul_(scales).sub_(groups).square_().sum(-1, keepdim=True)
