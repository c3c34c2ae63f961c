"""Shape of a speculative round (draft and verify), and where the draft branches lie in a row's KV; no torch.

S draft steps, K branches (top-k), T verified nodes, the root included. A chain is K = 1, T = S + 1, or longer where
tokens are looked up beside a head; plain decoding is S = 0, K = 1, T = 1. All widths and KV reserves of the engine are
derived here. Read by scheduler and device side.
"""

from dataclasses import dataclass
from enum import Enum

from roost.errors import ConfigError

MATCH_MAX = 8  # tokens that a lookup compares; a longer match is no better


class DraftKv(Enum):
    """What a drafter stores per KV slot."""

    NONE = "none"  # no KV of its own
    PAIR = "pair"  # EAGLE: slot p is computed from token p + 1 and the hidden state at p


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecShape:
    """S, K and T of the rounds, and what the drafter declares."""

    steps: int = 0
    topk: int = 1
    tokens: int = 1
    draft_kv: DraftKv = DraftKv.NONE
    reads_history: bool = False  # the drafter wants every token of a row when the row begins
    lookup_steps: int = 0  # drafts of a round that may be looked up, where that is not the one and only way; 0: none

    @property
    def depth_max(self) -> int:
        """Most drafts on one path of a round."""
        return max(self.steps, self.lookup_steps)

    @property
    def accept_max(self) -> int:
        """Most tokens any round can add to the output, bonus included."""
        return self.accept_max_of(self.tokens)

    def accept_max_of(self, width: int) -> int:
        """Most tokens a round that verifies `width` nodes can add to the output, bonus included."""
        return min(self.depth_max, width - 1) + 1  # a tree of few nodes may be less deep than S

    @property
    def speculates(self) -> bool:
        """Whether rounds carry drafts."""
        return self.steps > 0

    @property
    def pair(self) -> bool:
        """Whether the drafter's KV at a position depends on the next token."""
        return self.draft_kv is DraftKv.PAIR

    @property
    def branch_len(self) -> int:
        """Positions that each draft branch writes: the last draft of a path is verified, never run."""
        return max(0, self.head_steps_of(self.tokens) - 1) if self.pair else 0

    def head_steps_of(self, width: int) -> int:
        """Drafts that a head makes one after the other for a round that verifies `width` nodes."""
        return min(self.steps, width - 1)

    @property
    def scratch_len(self) -> int:
        """Positions past the device length that the draft branches of a round write."""
        return self.topk * self.branch_len

    @property
    def alloc_len_per_decode(self) -> int:
        """L: positions past the device length that a round may write, so that many are reserved."""
        return max(self.scratch_len, self.tokens)

    def lookup_nodes_of(self, width: int) -> int:
        """Nodes that looked-up drafts may take of a round that verifies `width`: all of a chain, half of a tree."""
        return min(self.lookup_steps, width - 1 if self.topk == 1 else width // 2)

    def branch_position(self, length: int, branch: int, step: int) -> int:
        """Row position that a branch writes at a draft step of a round that starts at device length `length`.

        The branches lie one after the other right behind the text, on pages of any size, and share what is before:

        0                      length      + branch_len      + 2 * branch_len      + scratch_len
        |-------- text --------|-- branch 0 --|-- branch 1 --|-- branch 2 --| ... |
        """
        return length + branch * self.branch_len + step

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
        if self.topk == 1 and self.tokens != self.depth_max + 1:
            raise ConfigError(
                f"--spec-tokens must be --spec-steps + 1 = {self.depth_max + 1} for a chain (--spec-topk 1), "
                f"got {self.tokens}"
            )
        candidates = num_candidates(self.steps, self.topk) if self.topk > 1 else self.depth_max
        if not 2 <= self.tokens <= candidates + 1:
            raise ConfigError(
                f"--spec-tokens must be in [2, {candidates + 1}]: a tree of --spec-topk {self.topk} and "
                f"--spec-steps {self.steps} has {candidates} candidates besides the root, got {self.tokens}"
            )


def num_candidates(steps: int, topk: int) -> int:
    """Draft tokens a tree is chosen from: K in the first step, then K for each of K branches in every further step."""
    return topk + (steps - 1) * topk**2


PLAIN = SpecShape()
