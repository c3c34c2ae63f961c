"""A made-up server to watch: frames as the engine makes them, and an HTTP server that sends what a test tells it to."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

KEY = "the-key"
PAGES = {
    "page_size": 16,
    "pools": [
        {
            "book": "full",
            "total": 63,
            "free": 50,
            "leased": 8,
            "cached": 5,
            "retiring": 0,
            "pages": [
                {"first": 0, "count": 1, "kind": "padding", "owner": None},
                {"first": 1, "count": 8, "kind": "leased", "owner": "session [bold]walk (idle)"},
                {"first": 9, "count": 5, "kind": "cached", "owner": "cached prefix, \u001b[2J64 tokens"},
                {"first": 14, "count": 50, "kind": "free", "owner": None},
            ],
        }
    ],
}
TOTALS = {
    "queued": 1,
    "running": 1,
    "sessions": 3,
    "waiting_for": "pages",
    "steps": 2,
    "step_age_ms": 3,
    "prompt_tokens": 1100,
    "cached_tokens": 64,
    "completion_tokens": 7,
    "retractions": 0,
    "failed_steps": 0,
    "sessions_reclaimed": 0,
    "endings": {"stop": 1, "length": 2, "abort": 0},
    "refusals": {"429": 1},
}


def whole(**changed: Any) -> dict[str, Any]:
    """A whole frame: two sessions and a fork, a row, a request that waits, two steps, a draft tree."""
    frame: dict[str, Any] = {
        "whole": True,
        "version": "0.1",
        "model": "tiny-model",
        "kinds": ["free", "leased", "cached", "retiring", "window", "padding"],
        "page_size": 16,
        "shows_text": False,
        "now_ms": 10_000.0,
        "health": "ok",
        "totals": dict(TOTALS),
        "pools": [pool(runs=[[0, 1, 5, ""], [1, 8, 1, "L12"], [9, 5, 2, "N7"], [14, 50, 0, ""]])],
        "owners": {"L12": "session walk (idle)", "N7": "cached prefix, 64 tokens"},
        "sessions": [
            session("walk", length=120, resident=96, turns=[40, 90]),
            session("copy", parent="walk", length=90, resident=90, turns=[40, 90], state="running", idle_ms=0),
            session("other", length=10, resident=0, turns=[10], idle_ms=60_000),
        ],
        "sessions_gone": [],
        "rows": [row("3f2a…")],
        "queue": [{"id": "77aa…", "session": None, "waits": "12 pages are not free"}],
        "steps": [step(1, 9_000.0, chunk=100), step(2, 9_500.0, new=7)],
        "tree": {"id": "3f2a…", "parents": [-1, 0, 0, 1], "accepted": [0, 1, 3]},
        "spec": {
            "rounds": 10,
            "offered": 30,
            "accepted": 15,
            "histogram": [2, 3, 3, 2],
            "lengths": [0, 0, 0, 10],
            "chosen": 3,
            "costs": [[1, 2.0], [4, 2.5]],
        },
    }
    return {**frame, **changed}


def change(**changed: Any) -> dict[str, Any]:
    """A frame in which only so much has changed."""
    return {"whole": False, "now_ms": 10_250.0, "health": "ok", "totals": {}, **changed}


def pool(**changed: Any) -> dict[str, Any]:
    """A pool of 63 pages."""
    sums = {"book": "full", "total": 63, "free": 50, "leased": 8, "cached": 5, "retiring": 0, "runs": []}
    return {**sums, **changed}


def session(name: str, **changed: Any) -> dict[str, Any]:
    """An idle session."""
    usual = {"id": name, "parent": None, "length": 0, "resident": 0, "turns": [], "state": "idle", "idle_ms": 1200}
    return {**usual, **changed}


def row(name: str, **changed: Any) -> dict[str, Any]:
    """A row that decodes."""
    usual = {"id": name, "session": "copy", "phase": "decode", "prompt": 100, "done": 100, "output": 7, "max": 256}
    return {**usual, "cached": 64, "accept": 2.4, **changed}


def step(number: int, start_ms: float, *, chunk: int = 0, new: int = 0, failed: bool = False) -> list[Any]:
    """A step as frames tell of it."""
    return [number, start_ms, 0.5, 8.0 * number, 0.25, 1, chunk, 4, new, failed]


class FrameServer:
    """An HTTP server with live frames: those that a test sends, to whoever watches."""

    def __init__(self, port: int = 0, *, status: int = 200, is_roost: bool = True) -> None:
        self.status = status
        self.is_roost = is_roost
        self.watchers: list[SimpleQueue[bytes | None]] = []
        self.first: Any = whole()  # what each watcher is sent first
        self.next: list[Any] = []  # and what after it; None: the end
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._http.daemon_threads = True
        self.port = self._http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def send(self, frame: Any) -> None:
        """Send a frame to all who watch."""
        for watcher in self.watchers:
            watcher.put(_event(frame))

    def close(self) -> None:
        """Go away, with all connections."""
        self._http.shutdown()
        self._http.server_close()
        for watcher in self.watchers:
            watcher.put(None)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if server.status != 200 or self.headers["authorization"] != f"Bearer {KEY}":
                    said = {"error": {"message": "no \x1b[2J", "param": "authorization"}}
                    self._answer(401 if server.status == 200 else server.status, json.dumps(said))
                elif not server.is_roost:
                    self._answer(200, "<html>", "text/html")
                elif self.path == "/v1/pages":
                    self._answer(200, json.dumps(PAGES))
                else:
                    self._watch()

            def _answer(self, status: int, text: str, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.end_headers()
                self.wfile.write(text.encode())

            def _watch(self) -> None:
                sent: SimpleQueue[bytes | None] = SimpleQueue()
                sent.put(b": ping\n\n" + _event(server.first))
                for frame in server.next:
                    sent.put(None if frame is None else _event(frame))
                server.watchers.append(sent)
                self._answer(200, "", "text/event-stream; charset=utf-8")
                while (data := sent.get()) is not None:
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _event(frame: Any) -> bytes:
    return f"data: {json.dumps(frame)}\n\n".encode()


@contextmanager
def watched(port: int = 0, **options: Any) -> Iterator[FrameServer]:
    """A server with live frames."""
    server = FrameServer(port, **options)
    try:
        yield server
    finally:
        server.close()
