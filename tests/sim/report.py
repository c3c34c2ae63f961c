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
