"""Ranks: the followers of rank 0: starting their processes, hearing of them, and noticing that one is lost.

A follower is lost when its channel ends, when it is silent, when it says that it failed, or when somebody says so of it
(`agreement`). Then all of them are killed, whoever waits for them is told, and nothing can go on: the engine ends. Made
at start-up.
"""

import json
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from roost.environment import with_device
from roost.errors import ConfigError, InvariantError, RankError, first_line
from roost.parallel.channel import Channel, Gone, Kind
from roost.parallel.group import JOIN_S

BEAT_S = 1.0  # between signs of life
SILENT_S = 6.0  # without one, a rank is lost
PAUSED_S = 2.0  # a look that comes so much later: this process was stopped, and has heard of nobody meanwhile
_PERIOD_S = 0.25  # between looks at the clock
_END_S = 5.0  # for which a process that was killed is waited for
_EOF_S = 2.0  # within which a channel that broke is known to have ended
FOLLOWER = (sys.executable, "-m", "roost.parallel.follower")

OnLost = Callable[[RankError], None]
Handler = Callable[[int, bytes], None]  # of a rank's message


@dataclass(slots=True, eq=False)
class _Follower:
    """One of them."""

    rank: int
    process: "subprocess.Popen[bytes]"
    channel: Channel
    told: "SimpleQueue[dict[str, Any]]" = field(default_factory=SimpleQueue)  # {}: nothing more will come
    heard_at: float = field(default_factory=time.monotonic)


class Ranks:
    """The ranks 1 to size - 1."""

    def __init__(self, size: int, *, on_device: tuple[str, ...] = (), within: Path | None = None) -> None:
        """Start the processes; on GPUs `on_device` names that of each rank. Their folder may be `within` another."""
        self.size = size
        self.folder = Path(tempfile.mkdtemp(prefix="roost-", dir=within))  # only this user may enter it
        self.lost: RankError | None = None
        self._changed = threading.Condition()  # of what follows, and of who is lost
        self._at_loss: list[OnLost] = []
        self._limit_s: float = JOIN_S  # of silence
        self._loses = False  # they are being ended
        self._is_closed = False
        self._handlers: dict[Kind, Handler] = {Kind.FAILED: self._failed}
        self._looks: list[Callable[[float], None]] = []
        self._nudge: Callable[[], None] = lambda: None
        self._followers: dict[int, _Follower] = {}  # by rank
        began: Future[None] = Future()
        # a follower dies with the thread that started it: that must be one which lives as long as the engine
        threading.Thread(target=self._keep, args=(on_device, began), name="ranks", daemon=True).start()
        began.result()
        threading.Thread(target=self._beat, name="ranks-beat", daemon=True).start()

    @property
    def pids(self) -> dict[int, int]:
        """Their processes, by rank."""
        return {rank: each.process.pid for rank, each in self._followers.items()}

    def tell(self, rank: int, said: dict[str, Any]) -> None:
        """Tell one of them something, while the group starts; raises RankError."""
        try:
            self._followers[rank].channel.tell(said)
        except Gone as gone:
            raise self._reason(rank) from gone

    def told(self, rank: int) -> dict[str, Any]:
        """What one of them says next, while the group starts; raises RankError, or the ConfigError that it has met."""
        try:
            said = self._followers[rank].told.get(timeout=JOIN_S)
        except Empty:
            raise RankError(f"rank {rank} did not start within {JOIN_S} s") from None
        if not said:
            raise self._reason(rank)
        if "config_error" in said:
            raise ConfigError(f"rank {rank}: {said['config_error']}")
        return said

    def handle(self, kind: Kind, handler: Handler) -> None:
        """Have somebody handle all messages of a kind; on a thread of the ranks', before `begin`."""
        self._handlers[kind] = handler

    def begin(self, look: Callable[[float], None], nudge: Callable[[], None]) -> None:
        """All are ready: from now on nobody may be silent; `look` is called often and `nudge` every second.

        Each on a thread of the ranks'; `nudge` may wait for them.
        """
        with self._changed:
            self._limit_s, self._nudge = SILENT_S, nudge
            self._looks.append(look)
            for each in self._followers.values():
                each.heard_at = time.monotonic()

    def send(self, kind: Kind, payload: bytes) -> None:
        """Send all of them the same; raises RankError."""
        for rank, each in self._followers.items():
            try:
                each.channel.send(kind, payload)
            except Gone as gone:
                raise self._reason(rank) from gone

    def tell_loss(self, on_lost: OnLost) -> None:
        """Have somebody told of a loss, also of one that there was."""
        with self._changed:
            self._at_loss.append(on_lost)
            lost = self.lost
        if lost is not None:
            on_lost(lost)

    def lose(self, why: str) -> RankError:
        """End all of them, and say why; the first reason counts."""
        with self._changed:
            if self._loses:  # then this is what came of it
                self._changed.wait_for(lambda: self.lost is not None, _END_S)
            if self._loses or self._is_closed:
                return self.lost or RankError(why)
            self._loses = True
        self._kill()  # before anybody hears of it
        with self._changed:
            lost = self.lost = RankError(why)
            told = list(self._at_loss)
            self._changed.notify_all()
        for each in told:
            each(lost)
        return lost

    def close(self) -> None:
        """End them; nobody is lost any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._kill()

    def _kill(self) -> None:
        for each in self._followers.values():
            with suppress(ProcessLookupError):
                each.process.kill()
            each.told.put({})
        for each in self._followers.values():
            with suppress(subprocess.TimeoutExpired):
                each.process.wait(_END_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _reason(self, rank: int) -> RankError:
        """Why a channel broke: that will be known in a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or self._is_closed, _EOF_S)
        return self.lost or RankError(f"rank {rank} has ended")

    # --- on threads of its own ---

    def _keep(self, on_device: tuple[str, ...], began: "Future[None]") -> None:
        try:
            for rank in range(1, self.size):
                self._followers[rank] = _start(rank, on_device[rank] if on_device else None)
        except OSError as error:
            self._kill()
            began.set_exception(ConfigError(f"--tp: rank {len(self._followers) + 1} cannot be started: {error}"))
            return
        by_place = {each.channel.fileno: each for each in self._followers.values()}
        began.set_result(None)
        poll = select.poll()
        for place in by_place:
            poll.register(place, select.POLLIN)
        looked_at = time.monotonic()
        while self.lost is None and not self._is_closed:
            ready = poll.poll(_PERIOD_S * 1000)
            now = time.monotonic()
            if now - looked_at > _PERIOD_S + PAUSED_S:
                for each in by_place.values():
                    each.heard_at = now
            looked_at = now
            for place, _ in ready:
                self._hear(by_place[place])
            self._look(now)
        for each in by_place.values():
            each.channel.close()

    def _hear(self, follower: _Follower) -> None:
        """A message, or the end."""
        try:
            kind, payload = follower.channel.receive()
        except (Gone, InvariantError):
            self.lose(f"rank {follower.rank} has ended: {_ending(follower.process)}")
            return
        follower.heard_at = time.monotonic()
        try:
            if kind is Kind.TELL:
                follower.told.put(json.loads(payload))
            elif kind in self._handlers:
                self._handlers[kind](follower.rank, payload)
        except (LookupError, TypeError, ValueError) as error:
            self.lose(f"rank {follower.rank} sent what nobody understands: {first_line(error)}")

    def _failed(self, rank: int, payload: bytes) -> None:
        self.lose(f"rank {rank} failed: {payload.decode(errors='replace')}")

    def _look(self, now: float) -> None:
        """Whether somebody is lost."""
        for rank, each in self._followers.items():
            if now - each.heard_at > self._limit_s:
                self.lose(f"rank {rank} has not been heard of for {self._limit_s:g} s")
        for look in self._looks:
            look(now)

    def _beat(self) -> None:
        while self.lost is None and not self._is_closed:
            for each in self._followers.values():
                each.channel.beat()
            with suppress(RankError):
                self._nudge()
            with self._changed:
                self._changed.wait_for(lambda: self.lost is not None or self._is_closed, BEAT_S)


def _start(rank: int, on_device: str | None) -> _Follower:
    own, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*FOLLOWER, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=with_device(on_device),
        )
    return _Follower(rank, process, Channel(own))


def _ending(process: "subprocess.Popen[bytes]") -> str:
    """How a process ended that has closed its channel."""
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return "it hangs as it ends"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
