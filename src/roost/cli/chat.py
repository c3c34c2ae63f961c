"""Talk with a model in the terminal.

The conversation is a session: each turn sends only what is new, and says how much it inherited, when the first token
came and how fast the others followed, and how many tokens a round of speculation gave if there was one. An answer that
is interrupted is forgotten. Runs the model here. Called by `main`.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from io import TextIOWrapper
from typing import Any

from rich.console import Console

from roost.cli import sample
from roost.cli.flags import add_engine, engine_of
from roost.dialogue import Session
from roost.errors import CapacityError, RequestError
from roost.front.options import Options
from roost.llm import LLM
from roost.terminal import loading_bar

with suppress(ImportError):  # then input() edits lines, and takes longer ones than a terminal's own buffer
    import readline  # noqa: F401

ENGINE_GONE = 503
DIGITS_MAX = 9
HELP = """/rewind [n]  forget the last n turns (1)
/fork        go on in a copy of this conversation
/back        leave the copy, back to where it was made
/stats       how the conversation and the engine stand
/help        this
/exit        end, as Ctrl-D does
Ctrl-C stops an answer; its turn is forgotten."""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--system", default=None, help="a system message; the template's own if absent")
    sample.add_flags(parser, temperature=0.7, max_new_tokens=512)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Read, answer, repeat."""
    console = Console(stderr=True, highlight=False)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is no text is shown so, and ends nothing
    with loading_bar() as progress:
        llm = LLM(config=engine_of(args), progress=progress)
    with llm:
        console.print(f"{llm.name} is ready. /help says what else there is; /exit or Ctrl-D ends.", style="dim")
        talk = _Talk(llm, console, args.system, sample.options_of(args))
        while (text := _read_line()) is not None and text != "/exit":
            try:
                talk.take(text)
            except RequestError as error:
                console.print(str(error), style="red", markup=False)
            except CapacityError as error:
                if error.status == ENGINE_GONE:
                    raise
                console.print(str(error), style="red", markup=False)
    return 0


def _read_line() -> str | None:
    """What was typed; None at the end. A Ctrl-C that comes too late for an answer forgets only what was typed."""
    at_terminal = sys.stdin.isatty()
    try:
        return input("> " if at_terminal else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not at_terminal:
            raise
        print()
        return ""


class _Talk:
    """A conversation, and those that it was forked from."""

    def __init__(self, llm: LLM, console: Console, system: str | None, options: Options) -> None:
        self._llm = llm
        self._console = console
        self._system = system
        self._options = options
        self._sessions: list[Session] = [llm.session()]  # the last one is talked to

    def take(self, text: str) -> None:
        """A line: a command, something to answer, or nothing."""
        if not text:
            return
        command, *words = text.split()
        match command:
            case "/rewind":
                self._rewind(words)
            case "/fork":
                self._sessions.append(self._sessions[-1].fork())
                self._say("a copy; /back returns to where it was made")
            case "/back":
                self._back()
            case "/stats":
                self._stats()
            case "/help":
                self._say(HELP)
            case _ if command.startswith("/") and command[1:].isalpha():
                self._say(f"there is no {command}; /help says what there is")
            case _:
                self._turn(text)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _rewind(self, words: list[str]) -> None:
        back = words[0] if words else "1"
        turns = self._sessions[-1].state().turns
        if not back.isdecimal() or len(back) > DIGITS_MAX or not 1 <= int(back) <= turns:
            raise RequestError(400, "/rewind", f"there are {turns} turns to forget, got {back[:20]}")
        state = self._sessions[-1].rewind(turn=turns - int(back))
        self._say(f"{state.turns} turns and {state.length} tokens are left")

    def _back(self) -> None:
        if len(self._sessions) == 1:
            raise RequestError(400, "/back", "this is no copy")
        self._sessions.pop().close()
        self._say(f"back, after {self._sessions[-1].state().turns} turns")

    def _stats(self) -> None:
        state, stats = self._sessions[-1].state(), self._llm.stats()
        self._say(f"{state.turns} turns, {state.length} tokens, {state.resident} of them resident")
        self._say(f"{stats.sessions} sessions, {stats.session_tokens} tokens resident in them")
        for pool in stats.pools:
            book = "full" if pool.window is None else "window"
            self._say(
                f"{book} pages: {pool.free} free, {pool.cached} cached, {pool.leased} in use, {pool.total} in all"
            )
        if stats.spec.rounds:
            self._say(f"accept length {stats.spec.accept_length:.2f} in {stats.spec.rounds} rounds")

    def _turn(self, text: str) -> None:
        """One answer, printed as it comes."""
        session, before = self._sessions[-1], self._sessions[-1].state()
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        if self._system and not before.length:
            messages.insert(0, {"role": "system", "content": self._system})
        began = time.monotonic()
        first: float | None = None
        num_tokens, finished = 0, None
        pieces = session.chat(messages, self._options)
        try:
            for piece in pieces:
                first = first or time.monotonic()
                num_tokens += len(piece.tokens)
                finished = piece.finished
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            pieces.close()
            print()
            is_kept = session.state().turns > before.turns
            self._say("this turn had ended already, and is kept" if is_kept else "this turn is forgotten")
            return
        print()
        assert first is not None and finished is not None
        note = f"{num_tokens} tokens"
        if num_tokens > 1:
            note += f", {(num_tokens - 1) / max(time.monotonic() - first, 1e-9):.1f}/s"
        usage, spec = finished.usage, finished.spec
        note += f"; first after {first - began:.2f} s; inherited {usage.cached_tokens} of {usage.prompt_tokens}"
        if spec.drafts_offered:
            note += f"; accept length {spec.accept_length:.2f}"
        self._say(note)
