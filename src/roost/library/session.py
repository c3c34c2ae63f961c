"""Dialogue: a session in the library. Its tokens and KV stay with the engine from turn to turn.

Owns the transcript that new chat messages are rendered after. A turn that is left early is rolled back; the next call
waits for that and goes on from there. For one thread at a time. Made by `LLM.session`.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeGuard
from uuid import uuid4

from roost.errors import CapacityError, RequestError
from roost.front.answer import Answer, Piece, checked
from roost.front.options import Options, TurnOf, plain_options, submits
from roost.library.engine_thread import Inbox, Line
from roost.messages import (
    CloseSession,
    Event,
    Finished,
    ForkSession,
    GetSession,
    Refused,
    RewindSession,
    SessionState,
    Tokens,
    Usage,
)
from roost.text.continuation import Transcript, continuation
from roost.text.language import EscapedMessage, Language
from roost.values import shown, token_ids

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[dict[str, Any]]  # role and content
COMMITTED = ("stop", "length")  # how a turn ends that becomes history


@dataclass(slots=True, kw_only=True, eq=False)
class _Turn:
    """A turn that has not ended."""

    inbox: Inbox
    messages: Sequence[EscapedMessage] | None  # None: plain input
    generates: bool
    output: list[int] = field(default_factory=list)
    is_left: bool = False  # nobody reads it any more, and it was told to end


class Session:
    """A conversation that is only ever appended to, or cut back."""

    def __init__(self, line: Line, language: Language, session_id: str, transcript: Transcript | None = None) -> None:
        self._line = line
        self._language = language
        self._transcript = transcript or Transcript()
        self._turn: _Turn | None = None
        self.id = session_id

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def append(self, given: Prompt | Messages, *, turn: int | None = None) -> Usage:
        """Add text, token ids or messages; they are prefilled at once, and nothing is generated.

        A turn's number, here and below, makes it safe to ask again: one that is committed already is a RepeatedTurn.
        """
        (*_, last) = self._pieces(given, Options(max_new_tokens=0), turn, generates=False)
        assert last.finished is not None
        if last.finished.reason not in COMMITTED:
            raise RequestError(409, "session_id", "the turn was ended before it was done; the session is where it was")
        return last.finished.usage

    def generate(
        self,
        given: Prompt | Messages | None = None,
        options: Options = Options(),  # noqa: B008
        *,
        turn: int | None = None,
    ) -> Generator[Piece, None, None]:
        """Pieces of what follows, after something new if that is given; leaving the loop undoes the turn."""
        return self._pieces(given, options, turn, generates=True)

    def chat(
        self,
        messages: Messages,
        options: Options = Options(),  # noqa: B008
        *,
        turn: int | None = None,
    ) -> Generator[Piece, None, None]:
        """Pieces of the model's answer to new messages; leaving the loop undoes the turn."""
        return self._pieces(as_messages(messages), options, turn, generates=True)

    def rewind(self, *, turn: int | None = None, length: int | None = None) -> SessionState:
        """Cut the session back to so many turns, or tokens."""
        self._settle()
        state = self._ask(RewindSession(session_id=self.id, turn=turn, length=length))
        self._transcript = self._transcript.cut(state.length, state.turns)
        return state

    def fork(self, *, id: str | None = None) -> "Session":
        """Another session that goes on from here; this one stays."""
        self._settle()
        state = self._ask(ForkSession(session_id=self.id, new_id=id if id is not None else uuid4().hex))
        return Session(self._line, self._language, state.session_id, self._transcript)

    def state(self) -> SessionState:
        """How the session stands; a turn that was left has been undone."""
        self._see_off()
        return self._ask(GetSession(session_id=self.id))

    def close(self) -> None:
        """Forget the session; a turn that still runs is ended. Closing again does nothing."""
        try:
            self._line.ask(CloseSession(session_id=self.id))
        except RequestError as error:
            if error.status not in (404, 410):
                raise
        except CapacityError:
            return  # the engine is gone, and all sessions with it
        self._see_off()

    def _ask(self, command: RewindSession | ForkSession | GetSession) -> SessionState:
        answer = self._line.ask(command)
        assert isinstance(answer, SessionState), answer
        return answer

    def _pieces(
        self, given: Prompt | Messages | None, options: Options, number: int | None, *, generates: bool
    ) -> Generator[Piece, None, None]:
        self._settle()
        options = plain_options(options)
        tokens, messages = self._input(given, generates=generates)
        name, tokenizer = self._line.new_id("turn"), self._language.tokenizer
        (submit,) = submits(name, tokens, options, tokenizer, TurnOf(session_id=self.id, number=number))
        answer = Answer(tokenizer, options)
        turn = _Turn(inbox=self._line.inbox(name), messages=messages, generates=generates)
        self._line.send(submit, turn.inbox)
        self._turn = turn
        try:
            while answer.finished is None:
                event = turn.inbox.events.get()
                self._take(turn, event)
                piece = answer.feed(checked(event))
                if piece is not None:
                    yield piece
        finally:
            # Not waited for here: an abandoned stream may be collected on any thread, the engine's own too.
            turn.is_left = True
            if self._turn is turn:
                self._line.abort(turn.inbox)

    def _input(
        self, given: Prompt | Messages | None, *, generates: bool
    ) -> tuple[tuple[int, ...], Sequence[EscapedMessage] | None]:
        """New tokens, and the messages they come from if they do."""
        transcript = self._transcript
        if given is not None and not isinstance(given, str) and not _are_messages(given):
            ids = _ids(given)
            if ids:
                return ids, None
            given = None
        if not given and transcript.is_chat and transcript.length:
            # nothing new: the model answers what was appended, or goes on
            return continuation(self._language, transcript, (), answers=generates), ()
        if given is None:
            return (), None
        if isinstance(given, str) and not transcript.length:
            return self._language.prompt_tokens(given), None
        if isinstance(given, str):
            return tuple(self._language.tokenizer.encode(given, special=False)), None
        escaped = self._language.escape(as_messages(given))
        return continuation(self._language, transcript, escaped, answers=generates), escaped

    def _take(self, turn: _Turn, event: Event) -> None:
        """Note what an event says about the session."""
        if isinstance(event, Tokens):
            turn.output += event.tokens
        elif isinstance(event, Finished | Refused):
            if isinstance(event, Finished) and event.reason in COMMITTED:
                self._transcript = self._transcript.add(
                    self._language,
                    length=event.usage.prompt_tokens + event.usage.completion_tokens,
                    messages=turn.messages,
                    output=turn.output if turn.generates else None,
                )
            self._turn = None
            self._line.forget(turn.inbox)

    def _settle(self) -> None:
        """See a turn that was left to its end; one that is still read is in the way."""
        self._see_off()
        if self._turn is not None:
            raise RequestError(409, "session_id", f"session {self.id!r} has a turn that has not ended")

    def _see_off(self) -> None:
        """See a turn that was left to its end."""
        turn = self._turn
        while turn is not None and turn.is_left and self._turn is turn:
            self._take(turn, turn.inbox.events.get())


def as_messages(given: object) -> list[dict[str, Any]]:
    """A conversation that a caller gave; raises RequestError for what is none. What a message holds, templates say."""
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise RequestError(400, "messages", f"must be a list of messages, got {shown(given)}")
    if not given:
        raise RequestError(400, "messages", "must hold at least 1 message")
    for number, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                400, f"messages[{number}]", f"must be a dict with role and content, got {shown(message)}"
            )
    return list(given)


def _ids(given: object) -> tuple[int, ...]:
    try:
        return token_ids("tokens", given)
    except RequestError as error:
        raise RequestError(400, "tokens", f"must be a text, token ids or messages: {error.reason}") from error


def _are_messages(given: object) -> TypeGuard[Messages]:
    return isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], dict)
