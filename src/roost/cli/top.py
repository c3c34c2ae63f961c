"""Watch a running server in the terminal: pages, sessions, rows, the queue and why it waits, step times, drafts.

Owns the terminal while it runs and leaves it as it was; a thread reads the server's frames and connects again when they
stop. Without a terminal, or with --once, one picture is printed as plain text. Called by `main`.
"""

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from io import TextIOWrapper
from itertools import islice
from queue import SimpleQueue
from typing import Any

from rich.console import Console, Group
from rich.live import Live

from roost.cli.http_client import HttpClient, NotJson, Unreachable, explained
from roost.cli.pages import add_url
from roost.cli.watch_screen import picture
from roost.cli.watched_server import LiveState
from roost.errors import CapacityError, RoostError
from roost.server.logs import printable

_PATH = "/live/frames"
_RETRY_S = 1.0
_LOOK_S = 0.1  # how often keys and frames are looked for
_DRAW_S = 0.5  # and how often times that pass are drawn anew without either
_FIRST_FRAMES = 5  # of an engine in a long step there is none for a while, and then one a second
_ENDED = "the stream has ended: the server stops, or its engine is gone"
EXAMPLES = """\
  roost top
  roost top --url http://127.0.0.1:8124
  roost top --once > picture.txt"""

Frames = Generator[Any, None, None]


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    add_url(parser)
    parser.add_argument("--once", action="store_true", help="print one picture as plain text and end")


def run(args: Namespace) -> int:
    """Draw until somebody has seen enough."""
    http, console = HttpClient(args.url), Console(highlight=False)
    with explained(_PATH):
        frames = http.watch(_PATH)
        server = _first_state(frames)
        if args.once or not console.is_terminal or console.is_dumb_terminal:
            frames.close()
            _print(server, args.url, console.width)
            return 0
        with _signals_as_exits(), suppress(KeyboardInterrupt), _keys_at_once():
            _Screen(server, _FrameReader(http, frames), args.url).show(console)
    return 0


def _first_state(frames: Frames) -> LiveState:
    """A server whose first frames have been read: a whole one, if its engine answers soon."""
    server = LiveState()
    for frame in islice(frames, _FIRST_FRAMES):
        server.merge(frame)
        if server.is_known or server.health != "stalled":
            break
    if not server.health:
        raise CapacityError(503, _ENDED)
    return server


def _print(server: LiveState, url: str, width: int) -> None:
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where the encoding has no block characters
    for line in picture(server, server.now_ms, url=printable(url), width=width):
        print(line.plain.rstrip())


class _FrameReader:
    """Reads frames in a thread of its own, and connects again when they stop."""

    def __init__(self, http: HttpClient, frames: Frames) -> None:
        self._http = http
        self._heard: SimpleQueue[Any] = SimpleQueue()  # frames; a text: why there are none for now; an error: no more
        threading.Thread(target=self._read, args=(frames,), daemon=True).start()

    def new(self) -> Iterator[Any]:
        """What has come since the last call: frames, and texts that say why there are none; raises what ends them."""
        while not self._heard.empty():
            heard = self._heard.get()
            if isinstance(heard, RoostError):
                raise heard
            yield heard

    def _read(self, frames: Frames) -> None:
        while True:
            try:
                with closing(frames):
                    for frame in frames:
                        self._heard.put(frame)
                self._heard.put(_ENDED)
            except (Unreachable, NotJson, CapacityError) as error:  # not JSON: a frame that was cut
                self._heard.put(printable(str(error)).removeprefix("--url: "))
            except RoostError as error:
                self._heard.put(error)
                return
            time.sleep(_RETRY_S)
            frames = self._http.watch(_PATH)


class _Screen:
    """The picture on the terminal."""

    def __init__(self, server: LiveState, reader: _FrameReader, url: str) -> None:
        self._server = server
        self._reader = reader
        self._url = printable(url)
        self._note = ""
        self._merged_s = time.monotonic()  # when the last frame came
        self._lost_s: float | None = None  # since when there are none

    def show(self, console: Console) -> None:
        """Draw until q is pressed: each frame, each new size, and times as they pass."""
        drawn_s, size = 0.0, None
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not _is_pressed("q"):
                is_new = self._take()
                if is_new or console.size != size or time.monotonic() - drawn_s >= _DRAW_S:
                    drawn_s, size = time.monotonic(), console.size
                    live.update(Group(*self._lines(size.width, size.height)), refresh=True)

    def _take(self) -> bool:
        """Merge what has come; whether anything has."""
        is_new = False
        for heard in self._reader.new():
            is_new = True
            if isinstance(heard, str):
                self._note = heard
                self._lost_s = self._lost_s or time.monotonic()
            else:
                self._server.merge(heard)
                self._note, self._lost_s, self._merged_s = "", None, time.monotonic()
        return is_new

    def _lines(self, width: int, height: int) -> list[Any]:
        now_s = time.monotonic()
        now_ms = self._server.now_ms + (now_s - self._merged_s) * 1000
        note = ""
        if self._lost_s is not None:
            note = f"lost for {now_s - self._lost_s:.0f} s, trying again: {self._note}"
        return list(picture(self._server, now_ms, url=self._url, note=note, width=width, height=height))


@contextmanager
def _keys_at_once() -> Iterator[None]:
    """Have keys read one by one and not shown; Ctrl-Z, which would leave the screen as it is, means nothing."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        mode = termios.tcgetattr(sys.stdin)
        mode[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(sys.stdin, termios.TCSANOW, mode)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Let a signal that ends the process leave the terminal as it was, too."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_pressed(key: str) -> bool:
    """Wait a little for keys; whether this one is among them, or there will be none any more."""
    if not sys.stdin.isatty():
        time.sleep(_LOOK_S)
        return False
    if not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        return False
    keys = os.read(sys.stdin.fileno(), 1024).decode(errors="replace")
    return not keys or key in keys.lower()
