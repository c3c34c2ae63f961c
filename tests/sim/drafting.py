"""Drafting: which drafts a device makes for a round, and how many nodes it verifies; the same for device and oracle.

A round's drafts are looked up or the head's, as its plan says for the length of the match: in chains the ones or the
others, in trees both. Where rounds are narrowed, no more is verified than was drafted, or than a grammar forces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile

from roost.config.options import NO_LOOKUP
from roost.config.resolved import Resolved
from roost.step import StepPlan
from tests.sim.model import Sequence

NO_TOKEN = 0  # drafted behind a head's last draft, where rounds are wider than that: right by chance
_WRONG_LOOKUPS = 50  # salts of their wrong tokens: other ones than the head's


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedRound:
    """What is drafted for one round."""

    num_nodes: int  # that are verified
    num_head: int  # drafts of the head, one after the other
    num_looked_up: int = 0  # looked-up drafts among the nodes
    match_len: int = 0
    is_used: bool = False  # whether the looked-up ones come first
    is_tree: bool = False

    def paths(self, head: list[int], found: list[int]) -> list[list[int]]:
        """Paths from the root whose nodes are verified; what comes first is best."""
        if not self.is_tree:
            if self.is_used:
                return [found[: self.num_looked_up]]
            return [(head + [NO_TOKEN] * self.num_nodes)[: self.num_nodes - 1]]
        if not self.is_used:
            return [head]
        found = found[: self.num_looked_up]
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(head, found, strict=False)))
        return [head[: num_shared + self.num_nodes - 1 - len(found)], found]


class Drafting:
    """How the device of one configuration drafts."""

    def __init__(self, resolved: Resolved) -> None:
        self._widths = resolved.widths
        self.looks_up = resolved.lookup != NO_LOOKUP and resolved.spec.speculates

    @property
    def narrows(self) -> bool:
        """Whether rounds verify no more than was drafted."""
        return self._widths.narrows

    def looks_up_for(self, plan: StepPlan, place: int) -> bool:
        """Whether drafts are looked up for a row of a step."""
        return self.looks_up and not plan.is_prefill[place] and bool(plan.query_lens[place] > 1)

    def of(self, plan: StepPlan, place: int, match_len: int, num_forced: int = 0) -> DraftedRound:
        """What is drafted for a round whose lookup finds so much; its grammar forces so many tokens after its root."""
        shape, most = plan.shape, int(plan.query_lens[place])
        if not self.looks_up_for(plan, place):
            return DraftedRound(num_nodes=most, num_head=shape.head_steps_of(most), is_tree=shape.topk > 1)
        table = plan.lookup_widths
        looked_up = most if table is None else int(table[place, match_len])
        nodes = most
        if self.narrows:
            nodes = min(most, max(looked_up or plan.head_width, 1 + num_forced))
        head_nodes = min(nodes, plan.head_width) if self.narrows else nodes
        has_head = shape.pair and not (self.narrows and looked_up)
        return DraftedRound(
            num_nodes=nodes,
            num_head=shape.head_steps_of(head_nodes) if has_head else 0,
            num_looked_up=shape.lookup_nodes_of(nodes) if shape.lookup_steps else nodes - 1,
            match_len=match_len,
            is_used=looked_up > 0,
            is_tree=shape.topk > 1,
        )


def guesses(sequence: Sequence, state: int, count: int, knows: Callable[[int], bool], salt: int = 0) -> list[int]:
    """So many drafts, each right where `knows` says so; a wrong one is gone on from all the same."""
    length, drafts = len(sequence), list[int]()
    for depth in range(1, count + 1):
        is_right = knows(state)
        drafts.append(sequence.model.next_token(state) if is_right else sequence.model.wrong_token(state, salt + depth))
        state = sequence.push(drafts[-1])[2]
    sequence.cut(length)
    return drafts


def look_up(sequence: Sequence, state: int, count: int) -> list[int]:
    """What followed where the last tokens came before."""
    return guesses(sequence, state, count, sequence.model.lookup_knows, _WRONG_LOOKUPS)
