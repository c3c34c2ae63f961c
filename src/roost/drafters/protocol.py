"""What the forward passes ask of a drafter, and what they hand over.

A drafter proposes trees for verify rounds, and takes over what every step wrote, prefill and rounds without drafts too,
so that what it keeps is up to date. Whatever it proposes, the output is the target's. Implemented in this folder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from roost.drafters.tree import Trees
from roost.layers.segments import Segments
from roost.step import RowSetup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pairs:
    """What a step wrote, as pairs: the token at position p + 1, and what the target made of position p.

    A round has as many pairs as it could have accepted; those past its accepted ones stand for nothing and lie past the
    row's new length.
    """

    segments: Segments  # the rows' pairs in the flat batch
    rows: Tensor  # [num_pairs]
    slots: Tensor  # [num_pairs] where the drafter's KV of them goes, in the full book
    positions: Tensor  # [num_pairs] p
    tokens: Tensor  # [num_pairs] the token at p + 1
    sources: Tensor | None  # [num_pairs] the token of the target's batch that stands at p; None: the very pair's
    hidden: Tensor  # [num_tokens, hidden_size] the target's last hidden states
    aux_hidden: tuple[Tensor, ...]  # those at the inputs of the layers that the drafter asked for
    sampling_rows: Tensor  # [num_sampling] rows that have a new root
    last_pairs: Tensor  # [num_sampling] the last pair of each of them, which ends in that root


class Drafter(Protocol):
    """Something that guesses what comes next."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs it wants to see."""
        ...

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Rows begin."""
        ...

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """Trees of `width` nodes for the rounds whose last sampled tokens are `roots` [R], one segment each.

        A root has no KV yet: its position is where its segment starts, the row's length on the device. Tokens are ids
        of the target's vocabulary, or NOTHING. Trees of another width, or branches where chains were asked for, are
        refused; node 0 is made the root. `forced` [R, width - 1], if it is known, are the tokens that a grammar leaves
        no choice about, and NOTHING from there on: guesses that go on from them are worth more.
        """
        ...

    def extend(self, pairs: Pairs) -> None:
        """Take over what a step wrote."""
        ...
