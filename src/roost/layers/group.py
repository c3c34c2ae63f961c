"""Group: the ranks that share a model under tensor parallelism, as a forward pass sees them.

Each rank has a part of every large matrix and runs the same steps. Behind a projection whose inputs are split, the
ranks' sums are added up (`all_reduce`); where outputs are split and all are wanted, they are put side by side
(`all_gather`). Both give the same bits on every rank. A model finds its group in its `Ops`; `ALONE` is a model in one
process, which pays nothing for it.
"""

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """The ranks of a model, and which of them this process is."""

    @property
    def rank(self) -> int:
        """The number of this one, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of the tensors that the ranks hand in; `part` may be overwritten."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """The ranks' tensors side by side, along the last dimension, in the order of the ranks."""
        ...


class Alone:
    """A model in one process."""

    rank = 0
    size = 1

    def all_reduce(self, part: Tensor) -> Tensor:
        """The same."""
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        """The same."""
        return part


ALONE: Group = Alone()
