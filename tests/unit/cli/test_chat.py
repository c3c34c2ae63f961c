"""`roost chat` as somebody at a terminal sees it: keys go in through a pseudo-terminal, and the screen comes out."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chain_model import save_chain

PATIENCE_S = 60  # nothing is expected to take this long
AGAIN_S = 5  # after which somebody presses a key again
CTRL_C, CTRL_D = "\x03", "\x04"
FLAGS = ("--temperature", "0", "--weights", "fp32", "--threads", "1", "--pool-tokens", "32768", "--context", "16384")
# makes the terminal the program's own, so that keys reach it as signals too, also where tests run in the background
TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


class Terminal:
    """A chat that runs, and all that it has printed."""

    def __init__(self, *flags: str, term: str = "dumb", program: tuple[str, ...] = ("-m", "roost")) -> None:
        self._keys, inside = pty.openpty()
        command = [sys.executable, "-c", TAKE_TERMINAL, *program, "chat", *flags]
        environment = {**os.environ, "TERM": term, "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, stdin=inside, stdout=inside, stderr=inside, env=environment, start_new_session=True
        )
        os.close(inside)
        self._screen = ""

    def type(self, keys: str) -> None:
        """Press keys; a long text goes in as fast as it is taken."""
        data = keys.encode()
        while data:
            self._read(0)
            if select.select([], [self._keys], [], 0.1)[1]:
                data = data[os.write(self._keys, data[:1024]) :]

    def until(self, text: str) -> str:
        """What is printed up to a text, which is forgotten here with all before it."""
        while text not in self._screen:
            assert self._read(PATIENCE_S), f"no {text!r} in {self._screen[-300:]!r}"
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


# as on a Python whose line editor knows no marks around a paste
NO_READLINE = (
    "-c",
    "import sys; sys.modules['readline'] = None; from roost.cli.main import main; sys.exit(main(sys.argv[1:]))",
)
PASTE = "first line\r\rthird line\r"


@pytest.mark.parametrize(
    ("term", "program", "keys"),
    [
        ("xterm", ("-m", "roost"), f"\x1b[200~{PASTE}\x1b[201~\r"),
        ("xterm", ("-m", "roost"), f"\x1b[200~{PASTE}and a rest\x1b[201~, typed on\r"),
        ("dumb", ("-m", "roost"), PASTE),
        ("dumb", NO_READLINE, PASTE),
    ],
    ids=["marked", "marked-and-typed-on", "unmarked", "without-readline"],
)
def test_a_paste_of_several_lines_is_one_message(
    tmp_path: Path, term: str, program: tuple[str, ...], keys: str
) -> None:
    folder = save_chain(tmp_path, "\n", "h", "e", "12", "!", "<|im_end|>")
    terminal = Terminal("--model", str(folder), *FLAGS[:-4], term=term, program=program)
    try:
        terminal.until("Ctrl-D ends.")
        terminal.until("> ")
        terminal.type(keys)
        terminal.until("he12!")
        terminal.until("5 tokens")
        terminal.until("> ")
        terminal.type("typed ahead\r/stats\r")  # a command is no part of a message
        terminal.until("2 turns, ")
        terminal.until("> ")
        terminal.type(CTRL_D)
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A chat with a model whose answers last longer than a busy machine takes to press a key."""
    folder = save_chain(tmp_path, "\n", "h", "e", context=16384)
    terminal = Terminal("--model", str(folder), "--max-new-tokens", "15000", *FLAGS)
    terminal.until("Ctrl-D ends.")
    terminal.until("> ")
    yield terminal
    terminal.close()


def test_ctrl_c_ends_an_answer_and_never_the_chat(terminal: Terminal) -> None:
    for _ in range(2):
        terminal.type("say\n")
        terminal.until("he")
        terminal.type(CTRL_C)
        assert "15000 tokens" not in terminal.until("this turn is forgotten")
        terminal.type("/stats\n")
        terminal.until("0 turns, 0 tokens")
        terminal.until("> ")
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.press_until(CTRL_C, "> ")
    terminal.type("/stats\n")
    terminal.until("0 turns, 0 tokens")
    terminal.until("> ")
    terminal.type("x" * 20000 + "\n")
    terminal.until("tokens: prompt of 200")  # and some of the template
    terminal.until("exceed the maximum allowed length")
    terminal.until("> ")
    terminal.type("\n\n/rewind abc\n")
    terminal.until("there are 0 turns to forget, got abc")
    terminal.until("> ")  # before it is read, this key means another thing
    terminal.type(CTRL_D)
    assert terminal.end() == 0
