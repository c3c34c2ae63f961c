"""What the runner asks of a drafter, and what it hands over.

A drafter proposes trees for rounds, and takes over what every step wrote, prefill and rounds without drafts too, so
that what it keeps is never behind. Whatever it proposes, the output is the target's. Implemented in this folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from roost.attention.protocol import Runs
from roost.drafters.tree import Trees
from roost.step import RowSetup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounds:
    """The rounds of a step that carry drafts."""

    rows: Tensor  # [R]
    rows_host: Sequence[int]
    starts: Sequence[int] | None  # device lengths when the step starts, where the host knows them
    lengths: Tensor  # [R] the same, on the device
    roots: Tensor  # [R] last sampled tokens
    width: int  # nodes of their trees: those of the widest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """What a step wrote, as pairs: the token at position p + 1, and what the target made of position p.

    A round has as many pairs as it could have accepted; those past its accepted ones stand for nothing and lie past the
    row's new length.
    """

    runs: Runs  # the rows' pairs in the flat batch
    rows: Tensor  # [num_pairs]
    positions: Tensor  # [num_pairs] p
    tokens: Tensor  # [num_pairs] the token at p + 1
    sources: Tensor  # [num_pairs] the token of the target's batch that stands at p
    last: Tensor  # [num_tokens, hidden_size] the target's last hidden states
    aux_hidden: tuple[Tensor, ...]  # those at the inputs of the layers that the drafter asked for
    heads: Tensor  # [num_sampling] index of the last pair of each row that has a root now
    head_rows: Tensor  # [num_sampling] those rows


class Drafter(Protocol):
    """Something that guesses what comes next."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it wants to see."""
        ...

    def begin(self, setup: RowSetup) -> None:
        """A row begins."""
        ...

    def propose(self, rounds: Rounds) -> Trees:
        """Trees of as many nodes as the rounds are wide."""
        ...

    def extend(self, pairs: Pairs) -> None:
        """Take over what a step wrote."""
        ...
