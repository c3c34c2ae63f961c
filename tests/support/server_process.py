"""A server process under test: starting it, asking it, watching its processes, ending it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240  # a machine may be busy; nothing is expected to take this long
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Value = TypeVar("Value")


class Server:
    """One `roost serve` and its engine."""

    def __init__(self, folder: Path, *flags: str, wait: bool = True, num_files: int | None = None) -> None:
        self._log = folder / "server.log"
        self._temporary = Path(tempfile.mkdtemp(prefix="r"))  # a short name: the path of a socket cannot be long
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(self._temporary)}
        command = [sys.executable, "-m", "roost", "serve", "--port", "0", "--strict-memory", "2", *flags]
        if num_files is not None:  # as many as the system lets it open
            command = ["sh", "-c", f'ulimit -n {num_files}; exec "$@"', "sh", *command]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        if wait:
            self.url = self._wait_until_ready()
            self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)
            self.engine_pid = self._child()

    @property
    def log(self) -> str:
        """What both processes have written."""
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """Send JSON."""
        return self.http.post(path, json=body, **options)

    def generate(self, body: dict[str, Any]) -> Any:
        """The answer of /generate, which must be one."""
        answer = self.post("/generate", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stats(self) -> dict[str, Any]:
        """How things stand in the engine."""
        stats: dict[str, Any] = self.http.get("/server_info").json()["stats"]
        return stats

    def is_at_rest(self) -> bool:
        """Whether nothing runs or waits, and every page is free or cached."""
        stats = self.stats()
        (pool,) = stats["pools"]
        is_idle = stats["queued"] == stats["running"] == stats["sessions"] == 0
        return is_idle and pool["leased"] == pool["retiring"] == 0 and pool["free"] + pool["cached"] == pool["total"]

    def check_rest(self) -> None:
        """Nothing of what came before is left behind, and all is well."""
        wait_until(self.is_at_rest)
        assert self.http.get("/health").status_code == 200
        stats = self.stats()
        assert stats["failed_steps"] == 0
        assert "rror" not in self.log, self.log
        assert "Traceback" not in self.log, self.log

    def close_sessions(self) -> None:
        """Close every session: those that a label has led to live on for an hour."""
        for session in self.http.get("/v1/sessions").json()["data"]:
            self.http.delete(f"/v1/sessions/{session['id']}")

    def litter(self) -> list[Path]:
        """What it has left among the temporary files."""
        return list(self._temporary.glob("roost-*"))

    def cpu_s(self) -> float:
        """Processor time that both processes have used."""
        return sum(_cpu_s(pid) for pid in (self.process.pid, self.engine_pid))

    def resident_bytes(self) -> int:
        """Memory that both processes hold."""
        pids = (self.process.pid, self.engine_pid)
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES for pid in pids)

    def stop(self) -> int:
        """End it as an operator would; gives the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """Make sure that nothing is left of it, whatever the test did."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _wait_until_ready(self) -> str:
        def ready() -> str:
            assert self.process.poll() is None, self.log
            found = re.search(r"is ready at (\S+) after", self.log)
            return found.group(1) if found else ""

        return wait_until(ready)

    def _child(self) -> int:
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(child)


class Stream:
    """An answer that is read event by event, or not read."""

    def __init__(self, server: Server, path: str, body: dict[str, Any], headers: httpx.Headers | None = None) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=PATIENCE_S, headers=headers)
        request = self._client.build_request("POST", path, json=body)
        self.response = self._client.send(request, stream=True)
        self._lines = self.response.iter_lines()

    def next(self) -> Any:
        """The next event; None at the end."""
        for line in self._lines:
            if line.startswith("data: "):
                return None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))
        return None

    def rest(self) -> list[Any]:
        """All events that are still to come."""
        events = []
        while (event := self.next()) is not None:
            events.append(event)
        return events

    def close(self) -> None:
        """Leave."""
        self.response.close()
        self._client.close()


def wait_until(check: Callable[[], Value]) -> Value:
    """What a check gives, once it gives something true."""
    ends = time.monotonic() + PATIENCE_S
    while not (value := check()):
        assert time.monotonic() < ends, f"waited in vain for {check}"
        time.sleep(0.02)
    return value


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
