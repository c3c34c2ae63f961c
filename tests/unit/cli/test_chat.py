"""`roost chat` as somebody at a terminal sees it: keys go in through a pseudo-terminal, and the screen comes out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chain_model import save_chain
from tests.support.terminal import Terminal

CTRL_C, CTRL_D = "\x03", "\x04"
FLAGS = ("--temperature", "0", "--weights", "fp32", "--threads", "1", "--pool-tokens", "32768", "--context", "16384")

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
    terminal = Terminal("chat", "--model", str(folder), *FLAGS[:-4], term=term, program=program)
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
    terminal = Terminal("chat", "--model", str(folder), "--max-new-tokens", "15000", *FLAGS)
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
