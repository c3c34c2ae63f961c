"""Shape of a speculative round (draft and verify), and where the draft branches lie in a row's KV; no torch.

S draft steps, K branches (top-k), T verified nodes, the root included. A chain is K = 1, T = S + 1; plain decoding is
S = 0, K = 1, T = 1. All widths and KV reserves of the engine are derived here. Read by scheduler and device side.
"""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from roost.errors import ConfigError


class DraftKv(Enum):
    """What a drafter stores per KV slot."""

    NONE = "none"  # no KV of its own
    PAIR = "pair"  # EAGLE: slot p is computed from token p + 1 and the hidden state at p


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Where the K draft branches of one round lie, in row positions.

    base            base + stride        base + 2*stride
    |--last--|live S|   |--hole--|live S|   |--hole--|live S|     end
    branch 0            branch 1            branch 2
    """

    length: int  # n, the device length when the round starts
    base: int  # start of branch 0: n rounded down to its page
    last: int  # tokens of the prefix on the partial page: n - base
    stride: int  # row positions per branch, whole pages
    topk: int

    @property
    def end(self) -> int:
        """First row position past every branch."""
        return self.base + self.topk * self.stride

    def position(self, branch: int, step: int) -> int:
        """Row position that `branch` writes at draft step `step`."""
        return self.base + branch * self.stride + self.last + step

    def tail_copies(self) -> list[tuple[int, int]]:
        """(from, to) row positions that give every branch after the first the prefix's partial page."""
        return [
            (self.base + i, self.base + branch * self.stride + i)
            for branch in range(1, self.topk)
            for i in range(self.last)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecShape:
    """S, K and T of the rounds, and what the drafter declares."""

    steps: int = 0
    topk: int = 1
    tokens: int = 1
    draft_kv: DraftKv = DraftKv.NONE
    reads_history: bool = False  # the drafter wants every token of a row when the row begins

    @property
    def accept_max(self) -> int:
        """Most tokens any round can add to the output, bonus included."""
        return self.accept_max_of(self.tokens)

    def accept_max_of(self, width: int) -> int:
        """Most tokens a round that verifies `width` nodes can add to the output, bonus included."""
        return min(self.steps, width - 1) + 1  # a tree of few nodes may be less deep than S

    @property
    def speculates(self) -> bool:
        """Whether rounds carry drafts."""
        return self.steps > 0

    @property
    def pair(self) -> bool:
        """Whether the drafter's KV at a position depends on the next token."""
        return self.draft_kv is DraftKv.PAIR

    def alloc_len_per_decode(self, page_size: int) -> int:
        """L: positions past the device length that a round may write, so that many are reserved."""
        if page_size == 1 or self.topk == 1 or self.draft_kv is DraftKv.NONE:
            return max(self.steps * self.topk, self.tokens)
        pages_per_branch = (page_size - 1 + self.steps + page_size - 1) // page_size
        return max(pages_per_branch * page_size * self.topk, self.tokens)

    def branches(self, length: int, page_size: int) -> Branches:
        """Where the branches of a round lie that starts at device length `length`."""
        last = length % page_size
        pages_per_branch = -(-(last + self.steps) // page_size)
        return Branches(
            length=length,
            base=length - last,
            last=last,
            stride=pages_per_branch * page_size,
            topk=self.topk,
        )

    def branch_ends(self, lengths: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
        """The ends of `branches` for many rounds at once."""
        last = lengths % page_size
        pages_per_branch = (last + (self.steps + page_size - 1)) // page_size
        return lengths - last + pages_per_branch * (page_size * self.topk)

    def check(self) -> None:
        """Raise ConfigError for a shape that no tree can have."""
        if self.steps < 0:
            raise ConfigError(f"--spec-steps must be at least 0, got {self.steps}")
        if not self.speculates:
            if self.topk != 1 or self.tokens != 1:
                raise ConfigError(
                    f"--spec-steps 0 needs --spec-topk 1 and --spec-tokens 1, got {self.topk} and {self.tokens}"
                )
            return
        if self.topk < 1:
            raise ConfigError(f"--spec-topk must be at least 1, got {self.topk}")
        if self.topk == 1 and self.tokens != self.steps + 1:
            raise ConfigError(
                f"--spec-tokens must be --spec-steps + 1 = {self.steps + 1} for a chain (--spec-topk 1), "
                f"got {self.tokens}"
            )
        candidates = num_candidates(self.steps, self.topk)
        if not 2 <= self.tokens <= candidates + 1:
            raise ConfigError(
                f"--spec-tokens must be in [2, {candidates + 1}]: a tree of --spec-topk {self.topk} and "
                f"--spec-steps {self.steps} has {candidates} candidates besides the root, got {self.tokens}"
            )


def num_candidates(steps: int, topk: int) -> int:
    """Draft tokens a tree is chosen from: K in the first step, then K for each of K branches in every further step."""
    return topk + (steps - 1) * topk**2


PLAIN = SpecShape()
