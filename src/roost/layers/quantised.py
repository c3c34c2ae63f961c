"""Quantised weights: a matrix in fewer bits, with the scales that turn it back into floats.

What models and loaders know of one: its size, the floats that it stands for, how several are stacked, and the
projection that it makes on its own device. Each form is a class in a file of this folder; `layers.linear` lists the
forms. Made by the readers of checkpoints, or at load from a matrix of floats.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

from torch import Tensor


class QuantisedWeight(ABC):
    """The matrix of a projection, [out_len, in_len]."""

    form: ClassVar[str]  # as --weights names it

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @abstractmethod
    def dequantise(self) -> Tensor:
        """The floats that it stands for: float32 [out_len, in_len]."""

    @classmethod
    @abstractmethod
    def stack(cls, weights: Sequence[Self]) -> Self | None:
        """One matrix of several that read the same input, along the outputs; None if they cannot share one."""

    @abstractmethod
    def linear(self, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The projection [num_tokens, in_len] -> [num_tokens, out_len], in bfloat16, as fast as the device has it."""


def stack(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
    """One matrix of several, along the outputs; None if they are of different forms or cannot share scales."""
    if len(weights) == 1:
        return weights[0]
    kinds = {type(each) for each in weights}
    return kinds.pop().stack(weights) if len(kinds) == 1 else None
