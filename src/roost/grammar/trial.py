"""Trial: a grammar is compiled in a process of its own first, which has so much time and memory and no more.

llguidance cannot be interrupted, and a few lines of intersected regular expressions keep it busy for minutes. A child
process has the tokenizer; for each grammar it forks, and the fork is ended by the system when its processor time or its
memory is spent. What comes through is then compiled again where it is needed. Run by grammar.compiler, on its threads.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from roost.errors import RequestError
from roost.grammar.build import build_matcher, build_tokenizer

MEMORY_MAX = 256 * 2**20  # bytes that compiling one grammar may take
_SPENT = {signal.SIGPROF, signal.SIGKILL, signal.SIGXCPU}  # how a fork ends whose time is up


class Trial:
    """Tries grammars, one at a time; the child is started when the first one comes."""

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        time_s_max: float,
        memory_max: int = MEMORY_MAX,
    ) -> None:
        self._settings = [tokenizer_json, vocab_size, sorted(eos_ids), time_s_max, memory_max]
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, grammar: str) -> str | None:
        """Why a grammar cannot be used, "" if it can; None if it takes longer than it may."""
        if not hasattr(os, "fork"):
            return ""  # then it is compiled untried
        if self._child is None or self._child.poll() is not None:
            self._child = self._started()
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.stdin.write(_line(grammar))
            self._child.stdin.flush()
            said: str | None = json.loads(self._child.stdout.readline() or b"null")
        except OSError:  # the child was ended from outside
            said = None
        return said

    def close(self) -> None:
        """End the child."""
        if self._child is not None and self._child.stdin is not None:
            self._child.kill()
            self._child.wait()

    def _started(self) -> "subprocess.Popen[bytes]":
        command, pipe = (sys.executable, "-m", "roost.grammar.trial"), subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert child.stdin is not None
        child.stdin.write(_line(self._settings))
        child.stdin.flush()
        return child


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def main() -> int:
    """The child: reads settings, then a grammar a line, and answers each with a line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches it too; it ends with its input
    tokenizer_json, vocab_size, eos_ids, time_s_max, memory_max = json.loads(sys.stdin.buffer.readline())
    tokenizer = build_tokenizer(tokenizer_json, vocab_size, eos_ids)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _limit(time_s_max, memory_max)
            os.write(write_end, _line(_error_of(tokenizer, json.loads(line))))
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as answer:
            said = answer.read()
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            said = _line(None if os.WTERMSIG(status) in _SPENT else _TOO_LARGE)
        sys.stdout.buffer.write(said or _line(_TOO_LARGE))
        sys.stdout.buffer.flush()
    return 0


_TOO_LARGE = "takes too much memory to compile"


def _limit(time_s_max: float, memory_max: int) -> None:
    """End this process when it has used so much processor time, or wants so much more memory."""
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory_max, now + memory_max))
    signal.setitimer(signal.ITIMER_PROF, time_s_max)


def _error_of(tokenizer: Any, grammar: str) -> str:
    try:
        build_matcher(tokenizer, grammar)
    except RequestError as error:
        return error.reason
    except MemoryError:
        return _TOO_LARGE
    except Exception as error:  # noqa: BLE001 (whatever llguidance does, somebody waits for an answer)
        return f"cannot be compiled: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
