"""Round counts: what the statistics of speculation must say of one request, counted by the oracle."""

from dataclasses import dataclass

from roost.messages import SpecStats


@dataclass(slots=True, kw_only=True)
class RoundCounts:
    """Sums over the live rounds of a request that carried drafts."""

    rounds: int = 0
    offered: int = 0  # drafts that they verified
    forced: int = 0  # accepted ones that its grammar left no choice about
    lookups: int = 0  # rounds in which looked-up drafts went before a head's
    looked_up: int = 0  # drafts of these that were looked up
    found_right: int = 0  # and accepted

    def differ(self, told: SpecStats) -> str | None:
        """Which of them statistics say otherwise; None if none."""
        due = {
            "rounds": self.rounds,
            "drafts_offered": self.offered,
            "drafts_forced": self.forced,
            "lookup_rounds": self.lookups,
            "lookup_offered": self.looked_up,
            "lookup_accepted": self.found_right,
        }
        said = (
            told.rounds,
            told.drafts_offered,
            told.drafts_forced,
            told.lookup_rounds,
            told.lookup_offered,
            told.lookup_accepted,
        )
        wrong = [f"{count} {name}" for (name, count), other in zip(due.items(), said, strict=True) if count != other]
        return ", ".join(wrong) or None


def total(one: SpecStats, other: SpecStats) -> SpecStats:
    """The sums of two requests' statistics."""
    return SpecStats(
        rounds=one.rounds + other.rounds,
        drafts_offered=one.drafts_offered + other.drafts_offered,
        drafts_accepted=one.drafts_accepted + other.drafts_accepted,
        drafts_forced=one.drafts_forced + other.drafts_forced,
        overshoot=one.overshoot + other.overshoot,
        lookup_rounds=one.lookup_rounds + other.lookup_rounds,
        lookup_offered=one.lookup_offered + other.lookup_offered,
        lookup_accepted=one.lookup_accepted + other.lookup_accepted,
        histogram=tuple(a + b for a, b in zip(one.histogram, other.histogram, strict=True)),
    )
