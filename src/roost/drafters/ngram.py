"""N-gram drafter: what followed the last tokens when they came before, in prompt or output, will follow again.

Everything is looked up (`Lookup`), whether much or little of it was found again: there is nobody else to ask. No
weights, no KV. Proposes chains. Called by the forward passes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from roost.drafters.lookup import Lookup
from roost.drafters.make import Parts
from roost.drafters.protocol import Pairs
from roost.drafters.tree import Trees, chains
from roost.errors import InvariantError
from roost.layers.segments import Segments
from roost.step import RowSetup


def make(parts: Parts) -> "NgramDrafter":
    """The drafter of an engine."""
    if parts.lookup is None:
        raise InvariantError("the n-gram drafter has nothing to look drafts up in")
    return NgramDrafter(parts.lookup)


class NgramDrafter:
    """Looks the last tokens up among those before them."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Nothing of the target but its tokens."""
        return ()

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Take their tokens."""
        self._lookup.begin(setups)

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """Chains of what followed."""
        drafts, _ = self._lookup.find(rounds, forced)
        return chains(torch.cat([roots[:, None], drafts[:, : width - 1]], dim=1))

    def extend(self, pairs: Pairs) -> None:
        """Remember the tokens of a step."""
        self._lookup.extend(pairs)
