"""Counters: sums since the start, and speculation statistics, per request and in all (live rows only).

Changed by settle and ending; read by reports.
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

    def count_round(self, width: int) -> None:
        """A live round verified `width` nodes."""
        self.draft_lengths[width - 1] = self.draft_lengths.get(width - 1, 0) + 1


@dataclass(slots=True, kw_only=True)
class SpecCounters:
    """Speculation statistics that grow: what a SpecStats is made from."""

    accept_max: int
    drafts_offered: int = 0
    drafts_forced: int = 0
    overshoot: int = 0
    lookup_rounds: int = 0
    lookup_offered: int = 0
    lookup_accepted: int = 0
    histogram: list[int] = field(default_factory=list)  # rounds by the drafts they accepted

    def __post_init__(self) -> None:
        self.histogram = [0] * self.accept_max

    @property
    def rounds(self) -> int:
        """Live rounds that carried drafts."""
        return sum(self.histogram)

    def snapshot(self) -> SpecStats:
        """The sums so far, frozen."""
        return SpecStats(
            rounds=self.rounds,
            drafts_offered=self.drafts_offered,
            drafts_accepted=sum(num_drafts * rounds for num_drafts, rounds in enumerate(self.histogram)),
            drafts_forced=self.drafts_forced,
            overshoot=self.overshoot,
            lookup_rounds=self.lookup_rounds,
            lookup_offered=self.lookup_offered,
            lookup_accepted=self.lookup_accepted,
            histogram=tuple(self.histogram),
        )

    def count_round(
        self,
        num_drafts: int,
        accept_len: int,
        kept: int,
        num_forced: int = 0,
        *,
        lookup_offered: int = 0,
        lookup_accepted: int = 0,
    ) -> None:
        """One live round: `num_drafts` verified beside the root, `accept_len` tokens accepted, `kept` returned.

        Of the accepted drafts `num_forced` were those that a grammar left no choice about. Where looked-up drafts went
        before a head's, `lookup_offered` of the drafts were looked up, and `lookup_accepted` of these accepted.
        """
        self.lookup_rounds += lookup_offered > 0
        self.lookup_offered += lookup_offered
        self.lookup_accepted += lookup_accepted
        self.drafts_forced += num_forced
        self.drafts_offered += num_drafts
        self.overshoot += accept_len - kept
        self.histogram[accept_len - 1] += 1
