"""Watched: what people who watch were told last.

A part of the scheduler's state, changed by the live view alone.
"""

from dataclasses import dataclass, field
from typing import Any

from roost.kv.pages import PageId

Json = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Watched:
    """What was told last, so that only changes are told next."""

    touched: list[set[PageId]]  # per book: pages that have moved since
    owners: dict[str, str] = field(default_factory=dict)
    sessions: dict[str, Json] = field(default_factory=dict)
    step: int = -1
    tree: Json | None = None
    wants_tree: bool = True
