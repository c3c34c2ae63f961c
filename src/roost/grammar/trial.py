"""Trial: a grammar is compiled in a process of its own first, which has so much time and memory and no more.

llguidance cannot be interrupted, and a few lines of intersected regular expressions keep it busy for minutes. A child
process has the tokenizer; for each grammar it forks, and the fork is ended by the system when its processor time or its
memory is spent. What comes through is then compiled again where it is needed. Run by grammar.compiler, on its threads.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.errors import RequestError, first_line
from roost.grammar.build import build_matcher, build_tokenizer

MEMORY_MAX = 256 * 2**20  # bytes that compiling one grammar may take
_WALL_S = 60  # after which a fork is ended that uses no processor time, whatever it waits for
_TOO_LARGE = "takes too much memory to compile"


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a grammar."""

    error: str | None  # why it cannot be used; "": it can; None: it takes longer than it may
    num_bytes: int = 0  # of memory that it took


class TrialFailure(Exception):
    """The child cannot be started, or ended by itself: nothing is known of the grammar."""


class Trial:
    """Tries grammars, one at a time; the child is started when the first one comes."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        *,
        time_s_max: float,
        memory_max: int = MEMORY_MAX,
    ) -> None:
        self._settings = [tokenizer_json, vocab_size, time_s_max, memory_max]
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and ending it
        self._is_closed = False

    def run(self, grammar: str) -> Tried:
        """Try a grammar; raises TrialFailure, after a second child, if there is no answer."""
        for _ in range(2):
            child = self._running()
            try:
                assert child.stdin is not None and child.stdout is not None
                child.stdin.write(_line(grammar))
                child.stdin.flush()
                return Tried(*json.loads(child.stdout.readline()))
            except (OSError, ValueError):  # it has ended: the answer is not there, or not whole
                self._end(child)
        raise TrialFailure("the process that tries grammars ended: its tokenizer may not be one that llguidance reads")

    def close(self) -> None:
        """End the child; none is started any more."""
        with self._lock:
            self._is_closed = True
            child = self._child
        if child is not None:
            self._end(child)

    def _running(self) -> "subprocess.Popen[bytes]":
        with self._lock:
            if self._is_closed:
                raise TrialFailure("the engine has ended")
            if self._child is not None:
                return self._child
            command, pipe = (sys.executable, "-m", "roost.grammar.trial"), subprocess.PIPE
            try:
                child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            except OSError as error:
                raise TrialFailure(f"no process can be started to try it: {first_line(error)}") from error
            self._child = child
        assert child.stdin is not None
        with suppress(OSError):  # it has ended: whoever reads its answer sees that
            child.stdin.write(_line(self._settings))
        return child

    def _end(self, child: "subprocess.Popen[bytes]") -> None:
        """Be rid of a child; a fork of its own ends with its time."""
        with self._lock:
            if self._child is child:
                self._child = None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(OSError):  # what was not written yet is nobody's
                pipe.close()


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def main() -> int:
    """The child: reads settings, then a grammar a line, and answers each with a line."""
    import resource  # noqa: PLC0415 - not everywhere, and needed in the child alone

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches it too; it ends with its input
    tokenizer_json, vocab_size, time_s_max, memory_max = json.loads(sys.stdin.buffer.readline())
    tokenizer = build_tokenizer(tokenizer_json, vocab_size)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            os.write(write_end, _line(_tried(tokenizer, json.loads(line), time_s_max, memory_max)))
            os._exit(0)
        os.close(write_end)
        sys.stdout.buffer.write(_answer(pid, read_end))
        sys.stdout.buffer.flush()
    return 0


def _answer(pid: int, read_end: int) -> bytes:
    """What a fork says, or what its end does."""
    with os.fdopen(read_end, "rb") as pipe:
        is_there, _, _ = select.select([pipe], [], [], _WALL_S)
        said = pipe.read() if is_there else b""
    if not is_there:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    is_spent = not is_there or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF)
    return _line((None,)) if is_spent else said or _line((_TOO_LARGE,))


def _tried(tokenizer: Any, grammar: str, time_s_max: float, memory_max: int) -> tuple[str, int]:
    """In a fork, which the system ends when it has used so much processor time, or wants so much more memory."""
    import resource  # noqa: PLC0415

    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_max, now + memory_max))
    signal.setitimer(signal.ITIMER_PROF, time_s_max)
    before, error = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, ""
    try:
        build_matcher(tokenizer, grammar)
    except RequestError as refused:
        error = refused.reason
    except MemoryError:
        error = _TOO_LARGE
    except Exception as broken:  # noqa: BLE001 (whatever llguidance does, somebody waits for an answer)
        error = f"cannot be compiled: {first_line(broken)}"
    return error, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


if __name__ == "__main__":
    sys.exit(main())
