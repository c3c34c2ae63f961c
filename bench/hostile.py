"""Requests that are meant to hurt others: `python -m bench.hostile`, with `--json PATH` for the numbers.

Starts a server, and sends each shape alone and three at once, from processes of their own, while this one asks /ready
all the time and reads another client's stream. Prints the longest wait for /ready, the longest pause between two events
of the stream, how long the shapes themselves took to be answered, and the server's own peak memory. The quiet line is
what this machine does anyway; compare with it.
"""

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.processes import Process

QUIET_S = 3.0
NEXT_S = 0.005  # between two questions to /ready
PATIENCE_S = 300
BODY_BYTES = 16 * 1024 * 1024 - 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What others felt of one shape."""

    shape: str
    at_once: int
    statuses: list[int]
    ready_ms: float  # longest answer of /ready
    stream_ms: float  # longest pause between two events
    took_s: float  # until all of them were answered
    peak_mb: float  # of the server's own process


def _text(unit: str, length: int = BODY_BYTES) -> str:
    return unit * (length // len(unit.encode()))


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


# Shapes by name: where they are sent, and how their bytes are made.
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "16 MB of one letter": (PLAIN, lambda: _json({"prompt": _text("a")})),
    "16 MB of words": (PLAIN, lambda: _json({"prompt": _text("the quick brown fox ")})),
    "16 MB of digits and signs": (PLAIN, lambda: _json({"prompt": _text("7#")})),
    "16 MB of Chinese": (PLAIN, lambda: _json({"prompt": _text("日本")})),
    "16 MB of escapes": (PLAIN, lambda: b'{"prompt": "' + b"\\u00e9" * (BODY_BYTES // 6) + b'"}'),
    "just not refused by length": (PLAIN, lambda: _json({"prompt": _text("7#", 600_000)})),
    "256 prompts of 60 KB": (PLAIN, lambda: _json({"prompt": [_text("ab ", 60_000)] * 256})),
    "4 MB message": (CHAT, lambda: _json({"messages": [_user(_text("a b ", 4_000_000))]})),
    "16 MB message": (CHAT, lambda: _json({"messages": [_user(_text("a b "))]})),
    "message of special tokens": (CHAT, lambda: _json({"messages": [_user(_text("<|im_end|>", 4_000_000))]})),
    "548k empty messages": (CHAT, lambda: _json({"messages": [_user("")] * 548_000})),
    "8,000 empty messages": (CHAT, lambda: _json({"messages": [_user("")] * 8_000})),
    "1.2 M unknown names": (CHAT, lambda: _json({f"k{number}": 1 for number in range(1_200_000)})),
    "65k unknown names": (CHAT, lambda: _json({f"k{number}": 1 for number in range(65_000)})),
    "5 M empty lists": (PLAIN, lambda: _json({"prompt": [[]] * 4_000_000})),
    "65k empty lists": (PLAIN, lambda: _json({"prompt": [[]] * 65_000})),
    "262k numbers": (PLAIN, lambda: _json({"prompt": [0.5] * 262_000})),
    "262k ids": (PLAIN, lambda: _json({"prompt": [7] * 262_000})),
    "nested 8 M deep": (PLAIN, lambda: b'{"prompt": ' + b"[" * 8_000_000),
    "metadata of 60k names": (CHAT, lambda: _json({"messages": [], "metadata": {f"k{n}": "" for n in range(60_000)}})),
}


class Server(Process):
    """A server of the default model."""

    def __init__(self, *flags: str) -> None:
        super().__init__([sys.executable, "-m", "roost", "serve", "--port", "0", *flags])

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        url = urlsplit(self.url)
        assert url.hostname is not None and url.port is not None, self.url
        return url.hostname, url.port

    def peak_mb(self) -> float:
        """The most memory that the server's own process has had since this was asked last."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


class Watcher(threading.Thread):
    """Does something again and again, and remembers the longest time that one took."""

    def __init__(self, place: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self._place = place
        self.longest = 0.0
        self._since = time.perf_counter()

    def take(self) -> float:
        """The longest so far, in milliseconds; from here on anew."""
        longest = max(self.longest, time.perf_counter() - self._since)
        self.longest = 0.0
        return 1e3 * longest

    def _saw(self) -> None:
        now = time.perf_counter()
        self.longest, self._since = max(self.longest, now - self._since), now


class Asking(Watcher):
    """Asks /ready."""

    def run(self) -> None:
        """Until the server has gone; each on a connection of its own."""
        with suppress(OSError):
            while True:
                self._since = time.perf_counter()
                connection = http.client.HTTPConnection(*self._place, timeout=PATIENCE_S)
                connection.request("GET", "/ready")
                connection.getresponse().read()
                connection.close()
                self._saw()
                time.sleep(NEXT_S)


class Reading(Watcher):
    """Reads another client's stream."""

    def run(self) -> None:
        """One answer after another; the first event of each does not count."""
        body = _json({"prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True})
        with suppress(OSError, http.client.HTTPException):
            while True:
                connection = http.client.HTTPConnection(*self._place, timeout=PATIENCE_S)
                connection.request("POST", PLAIN, body, {"content-type": "application/json"})
                response = connection.getresponse()
                self._since = time.perf_counter()
                while line := response.readline():
                    if line.startswith(b"data: "):
                        self._saw()
                connection.close()


def send(place: tuple[str, int], path: str, file: str, statuses: "multiprocessing.Queue[int]") -> None:
    """Send one of them, and tell how it was answered."""
    connection = http.client.HTTPConnection(*place, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, Path(file).read_bytes(), {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        statuses.put(answer.status)
    except OSError:
        statuses.put(0)


def measure(server: Server, shape: str, at_once: int, watchers: tuple[Watcher, Watcher], file: str) -> Measured:
    """What others feel while a shape is sent."""
    path, make = SHAPES[shape]
    Path(file).write_bytes(make())
    context = multiprocessing.get_context("spawn")
    statuses: multiprocessing.Queue[int] = context.Queue()
    senders = [context.Process(target=send, args=(server.place, path, file, statuses)) for _ in range(at_once)]
    time.sleep(0.5)
    server.peak_mb()
    for watcher in watchers:
        watcher.take()
    began = time.perf_counter()
    for sender in senders:
        sender.start()
    answers = [statuses.get() for _ in senders]
    took = time.perf_counter() - began
    time.sleep(0.2)
    ready_ms, stream_ms = (watcher.take() for watcher in watchers)
    for sender in senders:
        sender.join()
    return Measured(
        shape=shape,
        at_once=at_once,
        statuses=answers,
        ready_ms=ready_ms,
        stream_ms=stream_ms,
        took_s=took,
        peak_mb=server.peak_mb(),
    )


def main() -> None:
    """Measure every shape, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("flags", nargs="*", help="of roost serve, after --")
    args = parser.parse_args()
    measured = []
    with tempfile.NamedTemporaryFile() as file, Server(*args.flags) as server:
        watchers = Asking(server.place), Reading(server.place)
        for watcher in watchers:
            watcher.start()
        time.sleep(2)
        for watcher in watchers:
            watcher.take()
        time.sleep(QUIET_S)
        quiet = [watcher.take() for watcher in watchers]
        print(f"{os.cpu_count()} cores; quiet: /ready {quiet[0]:.0f} ms, stream {quiet[1]:.0f} ms")
        print(f"{'shape':<28}{'at once':>8}{'/ready ms':>11}{'stream ms':>11}{'took s':>12}{'peak MB':>9}  answers")
        for shape, at_once in itertools.product((each for each in SHAPES if args.only in each), (1, 3)):
            found = measure(server, shape, at_once, watchers, file.name)
            measured.append(found)
            numbers = f"{found.ready_ms:>11.0f}{found.stream_ms:>11.0f}{found.took_s:>12.1f}{found.peak_mb:>9.0f}"
            print(f"{shape:<28}{at_once:>8}{numbers}  {found.statuses}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(each) for each in measured], indent=1))


if __name__ == "__main__":
    main()
