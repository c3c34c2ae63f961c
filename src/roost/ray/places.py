"""Places: what the ingress and Ray's request router of one process share about the replicas.

A placement behind a lock, since Ray runs its router on a thread of its own, and the calls that are counted here. An
`Address` takes it from one to the other and stays in this process. Called by both.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from roost.router.placement import KEY_BYTES, Key, Placement, Wanted

HELD = "held"  # of a replica's routing stats: all keys that it holds, joined


class Places:
    """A placement for two threads, and how many calls of this process each replica has."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._placement = Placement()
        self._num_calls: Counter[str] = Counter()
        self._reports: dict[str, object] = {}  # the last stats that were read of each replica

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that take requests, as far as this process has heard."""
        return self._placement.replicas

    def update(self, stats: Mapping[str, Mapping[str, Any]]) -> None:
        """These replicas take requests, and say this about themselves."""
        with self._lock:
            self._placement.update(stats)
            for replica, said in stats.items():
                if said is not self._reports.get(replica):
                    held = said.get(HELD, b"")
                    keys = (held[at : at + KEY_BYTES] for at in range(0, len(held), KEY_BYTES))
                    self._placement.report(replica, keys)
            self._reports = dict(stats)

    def learn(self, replica: str, keys: Iterable[Key]) -> None:
        """A replica has just begun to hold these."""
        with self._lock:
            self._placement.learn(replica, keys)

    def holder(self, wanted: Wanted) -> str | None:
        """Who is known to hold what a request names."""
        with self._lock:
            return self._placement.holder(wanted)

    def is_lost(self, wanted: Wanted) -> bool:
        """Whether a replica that is gone has held what a request names."""
        with self._lock:
            return self._placement.is_lost(wanted)

    def choose(self, wanted: Wanted, queues: Mapping[str, int]) -> str:
        """The replica for a request; a queue may be known here or there."""
        with self._lock:
            loads = {each: max(queues.get(each, 0), self._num_calls[each]) for each in self._placement.replicas}
            return self._placement.choose(wanted, loads)

    def begin(self, replica: str) -> None:
        """A call of this process has begun."""
        with self._lock:
            self._num_calls[replica] += 1

    def end(self, replica: str) -> None:
        """It has ended."""
        with self._lock:
            self._num_calls[replica] -= 1
            if not self._num_calls[replica]:
                del self._num_calls[replica]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a call is to go; empty where it has arrived."""

    places: Places = field(default_factory=Places)
    wanted: Wanted = Wanted()
    only: str | None = None  # this replica; another one if it is gone, which then says so

    def __reduce__(self) -> tuple[Any, ...]:
        return Address, ()
