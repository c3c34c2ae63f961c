"""A pseudo-terminal under test: keys go into a command, and what it prints comes out."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time

PATIENCE_S = 60  # nothing is expected to take this long
AGAIN_S = 5  # after which somebody presses a key again
# makes the terminal the program's own, so that keys reach it as signals too, also where tests run in the background
TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


class Terminal:
    """A command that runs at a terminal, and all that it has printed."""

    def __init__(
        self,
        *words: str,
        term: str = "dumb",
        program: tuple[str, ...] = ("-m", "roost"),
        size: tuple[int, int] = (24, 200),  # lines, columns
    ) -> None:
        self._keys, inside = pty.openpty()
        self.resize(*size)
        self._mode = termios.tcgetattr(self._keys)
        command = [sys.executable, "-c", TAKE_TERMINAL, *program, *words]
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env={**kept, "TERM": term}, start_new_session=True
        )
        os.close(inside)
        self._screen = ""

    def resize(self, lines: int, columns: int) -> None:
        """Make the window another size."""
        fcntl.ioctl(self._keys, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def is_as_before(self) -> bool:
        """Whether keys mean what they did before the command."""
        return termios.tcgetattr(self._keys) == self._mode

    def type(self, keys: str) -> None:
        """Press keys; a long text goes in as fast as it is taken."""
        data = keys.encode()
        while data:
            self._read(0)
            if select.select([], [self._keys], [], 0.1)[1]:
                data = data[os.write(self._keys, data[:1024]) :]

    def until(self, text: str) -> str:
        """What is printed up to a text, which is forgotten here with all before it."""
        ends_at = time.monotonic() + PATIENCE_S  # a command may print without end, and never this
        while text not in self._screen:
            is_alive = self._read(PATIENCE_S) and time.monotonic() < ends_at
            assert is_alive, f"no {text!r} in {self._screen[-300:]!r}"
        seen, _, self._screen = self._screen.partition(text)
        return seen

    def press_until(self, key: str, text: str) -> None:
        """Press a key, and again if nothing comes of it: a signal between a prompt and its reading is lost."""
        for _ in range(PATIENCE_S // AGAIN_S):
            self.type(key)
            while text not in self._screen:
                if not self._read(AGAIN_S):
                    break
            else:
                break
        self.until(text)

    def end(self) -> int:
        """The exit code, once it has ended."""
        while self._read(PATIENCE_S):
            pass
        return self.process.wait(PATIENCE_S)

    @property
    def screen(self) -> str:
        """What it has printed and nobody has read."""
        return self._screen

    def close(self) -> None:
        """Make sure that nothing is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._keys)

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._keys], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self._keys, 65536)
        except OSError:  # the other end is closed
            return False
        self._screen += data.decode(errors="replace")
        return bool(data)
