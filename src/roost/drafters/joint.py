"""Joint drafter: a head's drafts, and looked-up ones where the last tokens came before, row by row.

A round whose match is long enough, as the plan says, takes what followed there: in chains instead of the head's drafts
and up to more of them, in trees beside the head's best nodes. Where the host computes, the head is not asked when
nobody needs it. Never decides what is kept. Called by the forward passes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roost.drafters.lookup import Lookup
from roost.drafters.protocol import Drafter, Pairs
from roost.drafters.tree import Trees, chains, with_lookup
from roost.layers.segments import Segments
from roost.spec_shape import SpecShape
from roost.step import RowSetup

_NO_TOKEN = 0  # behind the head's drafts in rounds that are wider than those: right by chance, if ever


class JointDrafter:
    """A head's drafter, and lookup."""

    def __init__(self, head: Drafter, lookup: Lookup, shape: SpecShape, *, is_host: bool) -> None:
        self.head, self._lookup, self._shape, self._is_host = head, lookup, shape, is_host

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What the head wants to see."""
        return self.head.aux_layers

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Both take the rows."""
        self.head.begin(setups)
        self._lookup.begin(setups)

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """The head's trees, with what was looked up."""
        drafts, is_used = self._lookup.find(rounds, forced)
        if self._shape.topk > 1:
            trees = self.head.propose(rounds, roots, width, forced)
            return with_lookup(trees, drafts[:, : self._shape.lookup_nodes_of(width)], is_used)
        looked_up = torch.cat([roots[:, None], drafts[:, : width - 1]], dim=1)
        head_width = min(self._lookup.head_width, 1 + self._shape.head_steps_of(width))
        if self._is_host:
            return chains(self._beside(looked_up, is_used, rounds, roots, head_width, forced))
        drafted = self._of_head(rounds, roots, head_width, forced)
        beyond = drafted.new_full((len(drafted), width - head_width), _NO_TOKEN)
        return chains(torch.where(is_used[:, None], looked_up, torch.cat([drafted, beyond], dim=1)))

    def _beside(
        self,
        looked_up: Tensor,
        is_used: Tensor,
        rounds: Segments,
        roots: Tensor,
        head_width: int,
        forced: Tensor | None,
    ) -> Tensor:
        """The head's drafts beside looked-up ones, of those rounds alone that it is needed for."""
        places = np.flatnonzero(~is_used.numpy())
        if not len(places):
            return looked_up
        if len(places) == len(roots):
            drafted = self._of_head(rounds, roots, head_width, forced)
        else:
            own = None if forced is None else forced[places]
            drafted = self._of_head(rounds.of_one_token(places), roots[places], head_width, own)
        looked_up[places, head_width:] = _NO_TOKEN
        looked_up[places, :head_width] = drafted
        return looked_up

    def _of_head(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Tensor:
        """Its chains: [R, width]."""
        if width == 1:
            return roots[:, None]
        return self.head.propose(rounds, roots, width, None if forced is None else forced[:, : width - 1]).tokens

    def extend(self, pairs: Pairs) -> None:
        """Both take over what a step wrote."""
        self.head.extend(pairs)
        self._lookup.extend(pairs)
