'''Lines: what somebody types or pastes, message by message.

A paste of several lines is one message: the terminal marks where it begins and ends (bracketed paste, with GNU
readline), and without such marks lines that come faster than anybody types belong together. What stands between """ and
""" is one message everywhere. Called by `chat`.
'''

import select
import sys
from contextlib import suppress

try:
    import readline  # then input() edits lines, and takes longer ones than a terminal's own buffer
except ImportError:
    readline = None  # type: ignore[assignment]

BLOCK = '"""'
_PASTE_S = 0.05  # a paste's next line is there by then, and nobody's next keystroke is


def prepare() -> None:
    """Have pastes marked, where that is known; once, before the first line."""
    if _marks_pastes():
        readline.parse_and_bind("set enable-bracketed-paste on")


def read_message(prompt: str = "> ") -> str | None:
    """The next message; None at the end. Ctrl-C forgets only what was typed."""
    at_terminal = sys.stdin.isatty()
    try:
        text = input(prompt if at_terminal else "").strip()
        if text.startswith(BLOCK):
            return _block(text.removeprefix(BLOCK), at_terminal)
        while at_terminal and text and not text.startswith("/") and not _marks_pastes() and _is_more_there():
            text += "\n" + input("... ")
        return text.strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not at_terminal:
            raise
        print()
        return ""


def _block(first: str, at_terminal: bool) -> str:
    """A message up to the mark that ends it, or to the end of all input."""
    lines = [first]
    with suppress(EOFError):
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(input("... " if at_terminal else ""))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines).strip()


def _marks_pastes() -> bool:
    """Whether a paste comes in one piece: GNU readline does that, other line editors do not."""
    return readline is not None and "GNU" in (readline.__doc__ or "")


def _is_more_there() -> bool:
    return bool(select.select([sys.stdin], [], [], _PASTE_S)[0])
