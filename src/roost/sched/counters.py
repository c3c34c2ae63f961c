"""Counters: sums since the start, and those of speculation (live rows only, in one place for request and everybody).

Changed by settle and ending; read by whoever reports.
"""

from dataclasses import dataclass, field

from roost.messages import SpecStats


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums since the start."""

    steps: int = 0  # collected
    failed_steps: int = 0
    last_step_at: int = 0  # of the clock, in nanoseconds: last step collected, or nothing to do
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    draft_lengths: dict[int, int] = field(default_factory=dict)  # live rounds by the drafts they carried
    preemptions: int = 0
    sessions_opened: int = 0  # forks included
    sessions_closed: int = 0  # by command
    sessions_expired: int = 0
    endings: dict[str, int] = field(default_factory=dict)  # requests by finish reason


@dataclass(slots=True, kw_only=True)
class SpecCounters:
    """Mutable sums behind a SpecStats."""

    accept_max: int
    rounds: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0
    overshoot: int = 0
    histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.histogram = [0] * self.accept_max

    def snapshot(self) -> SpecStats:
        """The sums so far, frozen."""
        return SpecStats(
            rounds=self.rounds,
            drafts_offered=self.drafts_offered,
            drafts_accepted=self.drafts_accepted,
            overshoot=self.overshoot,
            histogram=tuple(self.histogram),
        )


def count_round(counters: tuple[SpecCounters, ...], num_drafts: int, accept_len: int, kept: int) -> None:
    """One live round: `num_drafts` verified beside the root, `accept_len` tokens accepted, `kept` of them returned."""
    for each in counters:
        each.rounds += 1
        each.drafts_offered += num_drafts
        each.drafts_accepted += accept_len - 1
        each.overshoot += accept_len - kept
        each.histogram[accept_len - 1] += 1
