"""Agreement: that all ranks find the same in their steps, and break where the others do.

Every so often rank 0 asks what came of the steps since the last time, and compares digests. A step that breaks must
break on every rank, after as many collectives. A rank that differs, breaks alone or is not done is lost: the engine
cannot go on. Called by the executor of rank 0, and by the threads of its ranks.
"""

import json
import threading
import time
from dataclasses import dataclass, field

from roost.errors import RankError
from roost.parallel.channel import Kind
from roost.parallel.digest import StepDigest
from roost.parallel.ranks import Ranks
from roost.step import StepId

BEHIND_S = 7.0  # for which a follower may not be done with what rank 0 has finished
ALONE_S = 2.0  # within which a step that broke on one rank must break on all


@dataclass(frozen=True, slots=True)
class _Check:
    """What rank 0 has found in some steps, when it asked the others, and what they have found, by rank."""

    digest: StepDigest
    asked_at: float = field(default_factory=time.monotonic)
    found: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Break:
    """How a step broke on one rank."""

    num_calls: int  # collectives so far
    why: str
    at: float = field(default_factory=time.monotonic)


class RankAgreement:
    """Of rank 0 with its followers."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._changed = threading.Condition()  # of what follows
        self._checks: dict[int, _Check] = {}
        self._num_checks = 0
        self._broken: dict[StepId, dict[int, _Break]] = {}  # by rank
        self._waiting: tuple[StepId, float] | None = None  # for what rank 0 waits on its device, and since when
        ranks.handle(Kind.DIGEST, self._found)
        ranks.handle(Kind.BROKE, self._broke)
        ranks.tell_loss(self._wake)

    def check(self, digest: StepDigest, collected: bytes) -> None:
        """Ask the others what came of the steps that `digest` has; they collect what they are told first."""
        with self._changed:
            self._checks[self._num_checks] = _Check(digest)
            self._num_checks += 1
        self._ranks.send(Kind.CHECK, collected)

    def waits(self, step: StepId | None) -> None:
        """Rank 0 waits for a step on its device; None: no more."""
        self._waiting = None if step is None else (step, time.monotonic())

    def broke(self, step: StepId, num_calls: int, why: str, rank: int = 0) -> None:
        """A step broke on a rank, after so many collectives."""
        with self._changed:
            self._broken.setdefault(step, {}).setdefault(rank, _Break(num_calls, why))
            self._changed.notify_all()

    def await_all_broke(self, step: StepId) -> None:
        """Wait until a step has broken on all ranks, in the same place; raises RankError."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ranks.lost is not None or len(self._broken.get(step, ())) == self._ranks.size
            )
            if self._ranks.lost is not None:
                raise self._ranks.lost
            broken = self._broken.pop(step)
        if len({each.num_calls for each in broken.values()}) > 1:
            places = ", ".join(f"rank {rank} after {each.num_calls} collectives" for rank, each in broken.items())
            raise self._ranks.lose(f"step {step} did not break at the same place on all ranks: {places}")

    def look(self, now: float) -> None:
        """Whether somebody differs, or is not done."""
        with self._changed:
            checks = dict(self._checks)
            broken = {step: dict(each) for step, each in self._broken.items()}
        if (waiting := self._waiting) is not None and now - waiting[1] > BEHIND_S:
            self._ranks.lose(f"step {waiting[0]} does not end on rank 0's device: a rank, or the device, hangs in it")
        for number, check in checks.items():
            self._compare(number, check, now)
        for step, breaks in broken.items():
            if len(breaks) < self._ranks.size and now - min(each.at for each in breaks.values()) > ALONE_S:
                rank, first = next(iter(breaks.items()))
                others = ", ".join(str(other) for other in range(self._ranks.size) if other not in breaks)
                self._ranks.lose(f"step {step} broke on rank {rank} ({first.why}), and not on rank {others}")

    def _compare(self, number: int, check: _Check, now: float) -> None:
        digest, own = check.digest, check.digest.text()
        for rank, found in check.found.items():
            if found != own:
                self._ranks.lose(
                    f"rank {rank} has not found what rank 0 has in steps {digest.first} to {digest.last}: lengths or "
                    "tokens differ"
                )
        missing = [rank for rank in range(1, self._ranks.size) if rank not in check.found]
        if missing and now - check.asked_at > BEHIND_S:
            self._ranks.lose(f"rank {missing[0]} is not done with step {digest.last}, which rank 0 has finished")
        if not missing:
            with self._changed:
                del self._checks[number]

    def _found(self, rank: int, payload: bytes) -> None:
        said = json.loads(payload)
        with self._changed:
            self._checks[said["check"]].found[rank] = said["digest"]

    def _broke(self, rank: int, payload: bytes) -> None:
        said = json.loads(payload)
        self.broke(StepId(said["step"]), said["calls"], said["why"], rank)

    def _wake(self, lost: RankError) -> None:
        with self._changed:
            self._changed.notify_all()
