"""Speculation: its statistics as readers see them, the same in every interface.

Adds them up over requests, takes the difference of two readings, and writes and reads them as JSON. Counts nothing
itself: the engine does. Called by the server's endpoints, the library's users and the command line.
"""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from roost.messages import SpecStats


def total(parts: Iterable[SpecStats]) -> SpecStats:
    """The sums over some requests."""
    sum_of = SpecStats()
    for part in parts:
        sum_of = _combined(sum_of, part, 1)
    return sum_of


def since(before: SpecStats, now: SpecStats) -> SpecStats:
    """What was added between two readings of an engine's sums."""
    return _combined(now, before, -1)


def as_json(spec: SpecStats) -> dict[str, Any]:
    """The sums, and the lengths that follow from them."""
    return {**asdict(spec), "draft_length": spec.draft_length, "accept_length": spec.accept_length}


def from_json(value: dict[str, Any]) -> SpecStats:
    """What `as_json` wrote; a server that knows nothing of lookup beside a head says nothing about it."""
    return SpecStats(
        rounds=value["rounds"],
        drafts_offered=value["drafts_offered"],
        drafts_accepted=value["drafts_accepted"],
        drafts_forced=value["drafts_forced"],
        overshoot=value["overshoot"],
        lookup_rounds=value.get("lookup_rounds", 0),
        lookup_offered=value.get("lookup_offered", 0),
        lookup_accepted=value.get("lookup_accepted", 0),
        histogram=tuple(value["histogram"]),
    )


def _combined(left: SpecStats, right: SpecStats, sign: int) -> SpecStats:
    return SpecStats(
        rounds=left.rounds + sign * right.rounds,
        drafts_offered=left.drafts_offered + sign * right.drafts_offered,
        drafts_accepted=left.drafts_accepted + sign * right.drafts_accepted,
        drafts_forced=left.drafts_forced + sign * right.drafts_forced,
        overshoot=left.overshoot + sign * right.overshoot,
        lookup_rounds=left.lookup_rounds + sign * right.lookup_rounds,
        lookup_offered=left.lookup_offered + sign * right.lookup_offered,
        lookup_accepted=left.lookup_accepted + sign * right.lookup_accepted,
        histogram=tuple(a + sign * b for a, b in zip_longest(left.histogram, right.histogram, fillvalue=0)),
    )
