"""Talk with a model in the terminal: one in this process, or a running server's.

The conversation is a session: each turn sends only what is new, and says how much it inherited, when the first token
came and how fast the others followed, and how many tokens a round of speculation gave if there was one. An answer that
is interrupted is forgotten. Called by `main`.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, Protocol

from rich.console import Console

from roost.cli import sample
from roost.cli.flags import add_engine, check_no_engine, engine_of
from roost.cli.input_lines import Lines, is_command
from roost.cli.remote import Remote
from roost.errors import CapacityError, RequestError, RoostError
from roost.front.answer import Piece
from roost.front.options import Options
from roost.library.llm import LLM
from roost.library.session import Messages
from roost.messages import SessionState, Stats
from roost.terminal import loading_bar

ENGINE_GONE = 503
DIGITS_MAX = 9
HELP = """/system [text]  begin anew with this system message; alone: say what it is; - is none
/clear          forget the conversation, copies too, and begin anew
/rewind [n]     forget the last n turns (1)
/fork           go on in a copy of this conversation
/back           leave the copy, back to where it was made
/stats          how the conversation and the engine stand
/help           this
/exit           end, as Ctrl-D does
A paste of several lines is one message; so is what stands between \"\"\" and \"\"\".
Ctrl-C stops an answer; its turn is forgotten."""
EXAMPLES = """\
  roost chat --system "Answer in one sentence."
  roost chat --model ./Llama-3.2-1B --temperature 0
  roost chat --url http://127.0.0.1:8000             with a server that runs already"""


class Conversation(Protocol):
    """A session, wherever its engine is."""

    def chat(self, messages: Messages, options: Options) -> Generator[Piece, None, None]:
        """Pieces of the answer to new messages; leaving the loop undoes the turn."""
        ...

    def rewind(self, *, turn: int) -> SessionState:
        """Cut it back to so many turns."""
        ...

    def fork(self) -> "Conversation":
        """Another that goes on from here."""
        ...

    def state(self) -> SessionState:
        """How it stands; a turn that was left has been undone."""
        ...

    def close(self) -> None:
        """Forget it."""
        ...


class Partner(Protocol):
    """Who answers."""

    name: str

    def session(self) -> Conversation:
        """A new conversation."""
        ...

    def stats(self) -> Stats | None:
        """How things stand in the engine, as far as it says."""
        ...


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--system", default=None, help="a system message; the template's own if absent")
    parser.add_argument(
        "--url",
        default=None,
        help="a running server, with the key in $ROOST_API_KEY; a model in this process if absent",
    )
    sample.add_flags(parser, temperature=0.7, max_new_tokens=512)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Read, answer, repeat."""
    console = Console(stderr=True, highlight=False)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is no text is shown so, and ends nothing
    lines = Lines()
    with _partner(args) as partner:
        console.print(f"{partner.name} is ready. /help says what else there is; /exit or Ctrl-D ends.", style="dim")
        talk = _Talk(partner, console, args.system, sample.options_of(args))
        try:
            while (text := lines.next()) is not None and text != "/exit":
                _take(talk, text, console)
        finally:
            talk.close()
    return 0


@contextmanager
def _partner(args: Namespace) -> Iterator[Partner]:
    """A running server, or a model that is loaded here."""
    if args.url is not None:
        check_no_engine(args)
        yield Remote(args.url)
        return
    with loading_bar() as progress:
        llm = LLM(config=engine_of(args), progress=progress)
    with llm:
        yield llm


def _take(talk: "_Talk", text: str, console: Console) -> None:
    """One message; what cannot be done is said, and the chat goes on."""
    try:
        talk.take(text)
    except (RequestError, CapacityError) as error:
        if isinstance(error, CapacityError) and error.status == ENGINE_GONE:
            raise
        console.print(str(error), style="red", markup=False)


class _Talk:
    """A conversation, and those that it was forked from."""

    def __init__(self, partner: Partner, console: Console, system: str | None, options: Options) -> None:
        self._partner = partner
        self._console = console
        self._system = system
        self._options = options
        self._sessions: list[Conversation] = [partner.session()]  # the last one is talked to

    def take(self, text: str) -> None:
        """A line: a command, something to answer, or nothing."""
        if not text:
            return
        command, *words = text.split()
        match command:
            case "/system":
                self._set_system(text.removeprefix(command).strip())
            case "/clear":
                self._clear()
                self._say("the conversation is forgotten")
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
            case _ if is_command(text):
                self._say(f"there is no {command}; /help says what there is")
            case _:
                self._turn(text)

    def close(self) -> None:
        """Leave nothing behind in an engine that lives on; where it is gone, so are they."""
        with suppress(RoostError):
            while self._sessions:
                self._sessions.pop().close()

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _set_system(self, text: str) -> None:
        if text:
            self._clear()
            self._system = None if text == "-" else text
        said = "none, or the template's own" if self._system is None else self._system
        self._say(f"the system message{' of a new conversation' if text else ''}: {said}")

    def _clear(self) -> None:
        while len(self._sessions) > 1:
            self._sessions.pop().close()
        self._sessions[0].rewind(turn=0)

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
        state, stats = self._sessions[-1].state(), self._partner.stats()
        self._say(f"{state.turns} turns, {state.length} tokens, {state.resident} of them resident")
        if stats is None:
            self._say("the server does not say how its engine stands")
            return
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
        finished = None
        pieces = session.chat(messages, self._options)
        try:
            for piece in pieces:
                first = first or time.monotonic()
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
        usage, spec = finished.usage, finished.spec
        note = f"{usage.completion_tokens} tokens"
        if usage.completion_tokens > 1:
            note += f", {(usage.completion_tokens - 1) / max(time.monotonic() - first, 1e-9):.1f}/s"
        note += f"; first after {first - began:.2f} s; inherited {usage.cached_tokens} of {usage.prompt_tokens}"
        if spec.drafts_offered:
            note += f"; accept length {spec.accept_length:.2f}"
        self._say(note)
