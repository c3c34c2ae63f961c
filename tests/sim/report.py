"""Report of a simulated run: its verdict, and what it came across."""

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Report:
    """What a run did."""

    seed: int
    failure: str = ""  # '' if every check passed
    ticks: int = 0
    requests: int = 0
    tokens: int = 0
    audits: int = 0
    digest: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, other: "Report") -> None:
        """What another run of the same seed did."""
        self.failure = other.failure
        self.ticks += other.ticks
        self.requests += other.requests
        self.tokens += other.tokens
        self.counts |= {f"replicas: {what}": count for what, count in other.counts.items()}
