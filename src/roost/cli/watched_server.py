"""Watched server: what a running server's live frames say, merged into one state.

Owns how a frame is merged: a whole one replaces everything, the others bring what has changed. Texts are made printable
when they come in, so that no id of a client controls a terminal. Knows nothing of connections and draws nothing. Called
by `top` and `watch_screen`.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roost.errors import RoostError
from roost.server.logs import printable

STEPS_KEPT = 512
RATE_MS = 5000.0  # rates are those of so long
LABELS_MAX = 100_000  # labels of owners that are kept, also of those that own nothing any more
UNKNOWN_KIND = 255


class FrameError(RoostError):
    """A frame that this version cannot read."""


class WatchedStep(NamedTuple):
    """One step, as frames tell of it."""

    number: int
    start_ms: float
    host_ms: float
    device_ms: float
    collect_ms: float
    rows: int
    chunk_tokens: int
    width: int
    new_tokens: int
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedSession:
    """One session."""

    id: str
    parent: str | None
    length: int
    resident: int
    turns: tuple[int, ...]  # length of the session after each
    state: str
    since_ms: float  # when it became idle, in the server's time


@dataclass(slots=True, kw_only=True)
class WatchedPool:
    """One pool: its sums, and for each page its kind and its owner's key."""

    book: str
    total: int = 0
    sums: dict[str, int] = field(default_factory=dict)  # pages by state, as the ledger counts them
    kinds: bytearray = field(default_factory=bytearray)  # page 0 is padding
    owners: list[str] = field(default_factory=list)

    def merge(self, said: dict[str, Any]) -> None:
        """Take new sums, and the runs of pages that have changed."""
        self.total = int(said["total"])
        self.sums = {name: int(said[name]) for name in ("free", "leased", "cached", "retiring")}
        num_new = self.total + 1 - len(self.kinds)
        self.kinds.extend([UNKNOWN_KIND] * num_new)
        self.owners.extend([""] * num_new)
        for first, count, kind, owner in said.get("runs", ()):
            end = min(first + count, self.total + 1)
            if not 0 <= first <= end:
                raise ValueError(f"pages {first} to {end} of {self.total}")
            self.kinds[first:end] = bytes([kind]) * (end - first)
            self.owners[first:end] = [owner or ""] * (end - first)


class LiveState:
    """All that is known of a server, as of its last frame."""

    def __init__(self) -> None:
        self.is_known = False  # whether a whole frame has come
        self._forget()

    def _forget(self) -> None:
        self.version = self.model = ""
        self.kinds: tuple[str, ...] = ()
        self.page_size = 0
        self.now_ms = 0.0
        self.health = ""
        self.totals: dict[str, Any] = {}
        self.pools: dict[str, WatchedPool] = {}
        self.labels: dict[str, str] = {}
        self.sessions: dict[str, WatchedSession] = {}
        self.rows: list[dict[str, Any]] = []
        self.queue: list[dict[str, Any]] = []
        self.steps: deque[WatchedStep] = deque(maxlen=STEPS_KEPT)
        self.tree: dict[str, Any] | None = None
        self.spec: dict[str, Any] | None = None

    def merge(self, frame: Any) -> None:
        """Take a frame; of changes to what is not known yet only the health counts."""
        try:
            said = _printable(frame)
            if said["whole"]:
                self._forget()
                self._begin(said)
            self.health = str(said["health"])
            if self.is_known:
                self._change(said)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise FrameError(
                f"the server's frames are not as this version reads them ({error!r}): "
                "run `roost top` in the server's version, which /version says"
            ) from error

    def _begin(self, said: dict[str, Any]) -> None:
        self.version, self.model = str(said["version"]), str(said["model"])
        self.kinds = tuple(map(str, said["kinds"]))
        self.page_size = int(said["page_size"])
        self.is_known = True

    def _change(self, said: dict[str, Any]) -> None:
        self.now_ms = float(said.get("now_ms", self.now_ms))
        self.totals |= said.get("totals", {})
        for each in said.get("pools", ()):
            self.pools.setdefault(each["book"], WatchedPool(book=each["book"])).merge(each)
        self.labels |= said.get("owners", {})
        if len(self.labels) > LABELS_MAX:
            owning = {owner for pool in self.pools.values() for owner in pool.owners}
            self.labels = {key: label for key, label in self.labels.items() if key in owning}
        for name in said.get("sessions_gone", ()):
            self.sessions.pop(name, None)
        self.sessions |= {each["id"]: self._session(each) for each in said.get("sessions", ())}
        self.steps.extend(WatchedStep(*each) for each in said.get("steps", ()))
        self.rows = list(said.get("rows", self.rows))
        self.queue = list(said.get("queue", self.queue))
        self.tree = said.get("tree", self.tree)
        self.spec = said.get("spec", self.spec)

    def _session(self, said: dict[str, Any]) -> WatchedSession:
        return WatchedSession(
            id=said["id"],
            parent=said["parent"],
            length=int(said["length"]),
            resident=int(said["resident"]),
            turns=tuple(map(int, said["turns"])),
            state=said["state"],
            since_ms=self.now_ms - float(said["idle_ms"] or 0),
        )

    def holders(self, pool: WatchedPool, most: int) -> list[tuple[str, int]]:
        """Those that own the most pages of a pool, with how many."""
        counts = Counter(pool.owners[1:])
        del counts[""]
        return [(self.labels.get(key, key), count) for key, count in counts.most_common(most)]

    def rates(self, now_ms: float) -> tuple[float, float, float]:
        """Steps, output tokens and prompt tokens a second, over the last seconds or as far back as steps are known."""
        recent = [step for step in self.steps if step.start_ms > now_ms - RATE_MS]
        if not recent:
            return 0.0, 0.0, 0.0
        goes_back = len(recent) < STEPS_KEPT
        span_s = (RATE_MS if goes_back else max(now_ms - recent[0].start_ms, 1.0)) / 1000
        sums = len(recent), sum(step.new_tokens for step in recent), sum(step.chunk_tokens for step in recent)
        steps_s, output_s, prompt_s = (count / span_s for count in sums)
        return steps_s, output_s, prompt_s

    def family(self) -> list[tuple[int, WatchedSession]]:
        """Every session with its depth below the one it was forked from; active ones first, then by idle time.

        An id may be used again: of two sessions that name each other as parents, one is shown below the other.
        """
        children: dict[str | None, list[WatchedSession]] = {}
        for each in self.sessions.values():
            children.setdefault(each.parent if each.parent in self.sessions else None, []).append(each)
        found: dict[str, tuple[int, WatchedSession]] = {}
        waiting = [(0, each) for each in _last_first(children.get(None, ()))]
        while waiting or len(found) < len(self.sessions):
            if not waiting:
                waiting = [(0, next(each for each in self.sessions.values() if each.id not in found))]
            depth, session = waiting.pop()
            found[session.id] = (depth, session)
            below = [each for each in children.get(session.id, ()) if each.id not in found]
            waiting += [(depth + 1, each) for each in _last_first(below)]
        return list(found.values())


def _last_first(sessions: Iterable[WatchedSession]) -> list[WatchedSession]:
    """In the order in which a stack takes them: the one to show first at the end."""
    return sorted(sessions, key=lambda each: (each.state == "idle", -each.since_ms, each.id), reverse=True)


def _printable(value: Any) -> Any:
    """JSON whose texts cannot control a terminal."""
    match value:
        case str():
            return printable(value)
        case list():
            return [_printable(each) for each in value]
        case dict():
            return {printable(name): _printable(each) for name, each in value.items()}
    return value
