"""Chat with a model in the terminal: one in this process, or a running server's.

The conversation is a session: each turn sends only what is new, and reports how many tokens it inherited, the time to
the first token, the rate of the others, and if drafts were verified the accept length and what lookup had in it. An
interrupted answer is forgotten. Called by `main`.
"""

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, Protocol

from rich.console import Console

from roost.cli import generation_flags
from roost.cli.config_file import add_config, completed
from roost.cli.flag_parser import add_engine, check_no_engine, engine_of
from roost.cli.input_lines import MessageReader, is_command
from roost.cli.remote_sessions import RemoteServer
from roost.errors import CapacityError, RequestError, RoostError
from roost.front.answer import Piece
from roost.front.options import Options
from roost.library.llm import LLM
from roost.library.session import Messages
from roost.messages import SessionState, SpecStats, Stats
from roost.terminal import download_bar

ENGINE_GONE = 503
DIGITS_MAX = 9
HELP = """/system [text]  start over with this system message (- for none); without text: show it
/clear          forget the conversation and its copies, and start over
/rewind [n]     forget the last n turns (default: 1)
/fork           continue in a copy of this conversation
/back           leave the copy, back to where it was made
/stats          sizes of the conversation, statistics of the engine
/help           this
/exit           end, as Ctrl-D does
A paste of several lines is one message; so is what stands between \"\"\" and \"\"\".
Ctrl-C stops an answer; its turn is forgotten."""
EXAMPLES = """\
  roost chat --system "Answer in one sentence."
  roost chat --model ./Llama-3.2-1B --temperature 0
  roost chat --url http://127.0.0.1:8000             with a server that runs already"""


class ChatSession(Protocol):
    """A session of an engine in this process or of a server."""

    def chat(self, messages: Messages, options: Options) -> Generator[Piece, None, None]:
        """Pieces of the answer to new messages; leaving the loop undoes the turn."""
        ...

    def rewind(self, *, turn: int) -> SessionState:
        """Keep only the first `turn` turns."""
        ...

    def fork(self) -> "ChatSession":
        """A copy that continues from here."""
        ...

    def state(self) -> SessionState:
        """Its state, once a turn that was abandoned has been undone."""
        ...

    def close(self) -> None:
        """Close it and forget its tokens."""
        ...


class ChatModel(Protocol):
    """A model that answers: the library's LLM, or a server."""

    name: str

    def session(self) -> ChatSession:
        """A new session."""
        ...

    def stats(self) -> Stats | None:
        """The engine's statistics; None if the server does not report them."""
        ...


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("--system", default=None, help="a system message; the template's own if absent")
    parser.add_argument(
        "--url",
        default=None,
        help="a running server, whose key is in $ROOST_API_KEY; a model in this process if absent",
    )
    generation_flags.add_flags(parser, temperature=0.7, max_new_tokens=512)
    add_config(parser)
    add_engine(parser)


def run(args: Namespace) -> int:
    """Read, answer, repeat."""
    console = Console(stderr=True, highlight=False)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # invalid bytes become replacement characters instead of errors
    reader = MessageReader()
    with _model(args) as model:
        console.print(f"{model.name} is ready. /help says what else there is; /exit or Ctrl-D ends.", style="dim")
        chat = _ChatLoop(model, console, args.system, generation_flags.options_of(args))
        try:
            while (text := reader.next()) is not None and text != "/exit":
                _take(chat, text, console)
        finally:
            chat.close()
    return 0


@contextmanager
def _model(args: Namespace) -> Iterator[ChatModel]:
    """A running server, or a model that is loaded here."""
    if args.url is not None:
        check_no_engine(args)
        yield RemoteServer(args.url)
        return
    with download_bar() as progress:
        llm = LLM(config=engine_of(completed(args)), progress=progress)
    with llm:
        yield llm


def _take(chat: "_ChatLoop", text: str, console: Console) -> None:
    """Handle one message; errors are printed and the chat continues, unless the engine is gone."""
    try:
        chat.take(text)
    except (RequestError, CapacityError) as error:
        if isinstance(error, CapacityError) and error.status == ENGINE_GONE:
            raise
        console.print(str(error), style="red", markup=False)


class _ChatLoop:
    """The current session, and those that it was forked from."""

    def __init__(self, model: ChatModel, console: Console, system: str | None, options: Options) -> None:
        self._model = model
        self._console = console
        self._system = system
        self._options = options
        self._sessions: list[ChatSession] = [model.session()]  # the last one is the current one

    def take(self, text: str) -> None:
        """Handle a message: a command, a user's message, or an empty line."""
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
        """Close all sessions, so that nothing is left in a server that runs on."""
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
        state, stats = self._sessions[-1].state(), self._model.stats()
        self._say(f"{state.turns} turns, {state.length} tokens, {state.resident} of them resident")
        if stats is None:
            self._say("the server reports no statistics of its engine")
            return
        self._say(f"{stats.sessions} sessions, {stats.session_tokens} tokens resident in them")
        for pool in stats.pools:
            what = pool.book if pool.book == "states" else f"{pool.book} pages"
            self._say(f"{what}: {pool.free} free, {pool.cached} cached, {pool.leased} in use, {pool.total} in all")
        if stats.spec.rounds:
            self._say(
                f"accept length {stats.spec.accept_length:.2f} in {stats.spec.rounds} rounds{_lookups(stats.spec)}"
            )

    def _turn(self, text: str) -> None:
        """Run one turn, and print the answer as it arrives."""
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
            note += f"; accept length {spec.accept_length:.2f}{_lookups(spec)}"
        self._say(note)


def _lookups(spec: SpecStats) -> str:
    """What lookup brought beside a head, to go after the accept length; '' if nothing."""
    return f", {spec.lookup_share:.0%} of the accepted drafts looked up" if spec.lookup_accepted else ""
