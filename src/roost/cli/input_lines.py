'''Lines: what somebody types or pastes, message by message.

A paste of several lines is one message: the terminal marks where it begins and ends, if it and the line editor know how
(bracketed paste), and lines that come faster than anybody types belong together in any case, up to a command. What
stands between """ and """ is one message everywhere, also where no terminal is. Called by `chat`.
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


def is_command(text: str) -> bool:
    """Whether a line is said to the chat itself: a slash and a word."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word.startswith("/") and word[1:].isalpha()


class Lines:
    """Standard input, message by message."""

    def __init__(self) -> None:
        self._at_terminal = sys.stdin.isatty()
        self._held: str | None = None  # a command that was read behind a message
        self._has_ended = False
        if readline is not None and "GNU" in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")

    def next(self) -> str | None:
        """The next message; None at the end. Ctrl-C forgets only what was typed."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        try:
            return None if self._has_ended else self._message(self._line("> "))
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not self._at_terminal:
                raise
            print()
            return ""

    def _line(self, prompt: str) -> str:
        return input(prompt if self._at_terminal else "")

    def _message(self, first: str) -> str:
        """A line, and what belongs to it."""
        text = first.strip()
        if text.startswith(BLOCK):
            return self._block(text.removeprefix(BLOCK))
        lines = [text]
        try:
            while text and not is_command(text) and self._held is None and self._is_more_there():
                line = self._line("... ")
                if is_command(line):
                    self._held = line.strip()
                else:
                    lines.append(line)
        except EOFError:
            self._has_ended = True
        return "\n".join(lines).strip()

    def _block(self, first: str) -> str:
        """A message up to the mark that ends it, or to the end of all input."""
        lines = [first]
        with suppress(EOFError):
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._line("... "))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip()

    def _is_more_there(self) -> bool:
        return self._at_terminal and bool(select.select([sys.stdin], [], [], _PASTE_S)[0])
