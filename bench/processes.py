"""A server in a process of its own, as benchmarks start and watch it: where it listens, its memory, its CPU time.

Owns the process and its log, and ends it when the context is left. A server is ready when its log says at which URL;
both `roost serve` and `bench.llama_cpp` do. Sizes and times are read from /proc, children included. Used by `hostile`,
`serving` and `versus_llama_cpp`.
"""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_POLL_S = 0.01
_STOP_S = 60


def cores_busy_s() -> float:
    """CPU seconds that this machine's cores have worked, for whomever, since it was started."""
    user, nice, system, _idle, _iowait, *rest = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    return sum(map(int, (user, nice, system, *rest))) / os.sysconf("SC_CLK_TCK")


class Process:
    """A server; entering the context waits until it is ready, leaving it ends the server."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str] | None = None) -> None:
        self._command, self._environment = list(command), dict(environment or {})
        self.url = ""
        self.began = self.ready_s = 0.0  # perf_counter() when it was started, and seconds until it was ready

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="roost-bench-")
        log = Path(self._folder.name) / "log"
        self.began = time.perf_counter()
        with log.open("wb") as out:
            self._popen = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | self._environment,
            )
        try:
            self.url = self._wait(log)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.ready_s = time.perf_counter() - self.began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._folder.cleanup()

    def _wait(self, log: Path) -> str:
        while not (found := re.search(r"ready at (http://\S+)\s", log.read_text(errors="replace"))):
            if self._popen.poll() is not None:
                raise SystemExit(f"{' '.join(self._command)}\nended before it was ready:\n{log.read_text()}")
            time.sleep(_POLL_S)
        return found[1]

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._popen.pid

    def resident_mb(self) -> list[float]:
        """Resident megabytes of each process, the first one's first."""
        pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in self._family()]
        return [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]

    def proportional_mb(self) -> float:
        """Megabytes of all processes, with pages that several share divided among those (PSS)."""
        texts = [Path(f"/proc/{each}/smaps_rollup").read_text() for each in self._family()]
        return sum(int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) for text in texts) * 1024 / 1e6

    def cpu_s(self) -> float:
        """CPU seconds of all processes, so far."""
        ticks = 0
        for each in self._family():
            values = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(values[11]) + int(values[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _family(self) -> list[int]:
        """The process and its children."""
        tasks = Path(f"/proc/{self.pid}/task").glob("*/children")  # each thread lists those that it started
        return [self.pid, *(int(child) for task in tasks for child in task.read_text().split())]
