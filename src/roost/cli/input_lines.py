'''Input lines: what somebody types or pastes, as messages.

A paste of several lines is one message: terminals and line editors that know bracketed paste mark where it
starts and ends, and otherwise lines that come faster than anybody types belong together, up to a command. What stands
between """ and """ is one message everywhere, also without a terminal. Called by `chat`.
'''

import select
import sys
from contextlib import suppress

try:
    import readline  # lets input() edit lines, and read longer ones than a terminal's own buffer
except ImportError:
    readline = None  # type: ignore[assignment]

BLOCK = '"""'
_PASTE_S = 0.05  # a paste's next line arrives within this time, a typed one does not


def is_command(text: str) -> bool:
    """Whether a line is a command to the chat itself: a slash and a word."""
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    return word.startswith("/") and word[1:].isalpha()


class MessageReader:
    """Standard input, message by message."""

    def __init__(self) -> None:
        self._at_terminal = sys.stdin.isatty()
        self._held: str | None = None  # a command that was read together with the message before it
        self._has_ended = False
        if readline is not None and "GNU" in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")

    def next(self) -> str | None:
        """The next message; None at the end of input. Ctrl-C discards only the line being typed."""
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
        """The message that begins with this line."""
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
        """A message up to the closing quotes, or to the end of input."""
        lines = [first]
        with suppress(EOFError):
            while not lines[-1].rstrip().endswith(BLOCK):
                lines.append(self._line("... "))
            lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines).strip()

    def _is_more_there(self) -> bool:
        return self._at_terminal and bool(select.select([sys.stdin], [], [], _PASTE_S)[0])
