"""Session: a session in the library. Its tokens and KV stay with the engine from turn to turn.

Sends turns and session commands and waits for them; what a session is, `front.session` says. A turn that is abandoned
early is rolled back; the next call waits for that and goes on from there. For one thread at a time. Made by
`LLM.session`.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeGuard
from uuid import uuid4

from roost.errors import CapacityError, RequestError
from roost.front.answer import Answer, Piece, checked
from roost.front.options import Options, TurnOf, submits
from roost.front.session import ClientSession, ClientTurn, check_committed
from roost.front.turn_notes import note_of
from roost.library.conversation import ChatArguments, ChatCall, Schema, ToolChoice, Tools, compiled_options, read_chat
from roost.library.engine_thread import EngineThread, Events
from roost.messages import CloseSession, ForkSession, GetSession, RewindSession, SessionState, Usage
from roost.text.language import Language
from roost.tools.definitions import ToolRequest
from roost.tools.model_formats import ModelFormats
from roost.values import shown, token_ids

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[dict[str, Any]]  # role and content


@dataclass(slots=True, kw_only=True, eq=False)
class _SentTurn:
    """A turn that was sent, and where its events arrive."""

    turn: ClientTurn
    events: Events = field(default_factory=Events)
    is_abandoned: bool = False  # nobody reads it any more, and it was aborted


class Session:
    """A conversation that is only ever appended to, or cut back."""

    def __init__(self, engine: EngineThread, language: Language, formats: ModelFormats, session: ClientSession) -> None:
        self._engine = engine
        self._language = language
        self._formats = formats
        self._session = session
        self._sent: _SentTurn | None = None  # the last turn that was sent
        self.id = session.id

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
        check_committed(last.finished)
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
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        schema: Schema | None = None,
        turn: int | None = None,
    ) -> Generator[Piece, None, None]:
        """Pieces of the model's answer to new messages; leaving the loop undoes the turn.

        The answer may call tools, or must be JSON by a schema or a pydantic model. A session's tools are those of its
        first messages: later turns give the same again, or none.
        """
        asked = ChatArguments(options=options, tools=tools, tool_choice=tool_choice, schema=schema)
        call = read_chat(self._engine, self._formats, self._language.tokenizer, asked)
        return self._pieces(as_messages(messages), call.options, turn, generates=True, call=call)

    def rewind(self, *, turn: int | None = None, length: int | None = None) -> SessionState:
        """Cut the session back to so many turns, or tokens."""
        self._check_idle()
        state = self._ask(RewindSession(session_id=self.id, turn=turn, length=length))
        self._session.rewind(state)
        return state

    def fork(self, *, id: str | None = None, turn: int | None = None, length: int | None = None) -> "Session":
        """Another session that goes on from here, or from so many committed turns, or tokens; this one stays.

        From committed turns or tokens it can be made while a turn is being read, too, of which nothing counts then.
        """
        self._await_abandoned()
        if turn is None and length is None:
            self._check_idle()
        new_id = id if id is not None else uuid4().hex
        state = self._ask(ForkSession(session_id=self.id, new_id=new_id, turn=turn, length=length))
        if state.turns > len(self._session.usages) or state.length > self._session.transcript.length:
            self._engine.ask(CloseSession(session_id=state.session_id))
            raise RequestError(409, "session_id", f"session {self.id!r} has a turn whose end has not been read")
        forked = self._session.fork(state.session_id, state.length, state.turns)
        return Session(self._engine, self._language, self._formats, forked)

    def state(self) -> SessionState:
        """How the session stands; an abandoned turn has been undone by then."""
        self._await_abandoned()
        return self._ask(GetSession(session_id=self.id))

    def close(self) -> None:
        """Forget the session; a turn that still runs is ended. Closing again does nothing."""
        try:
            self._engine.ask(CloseSession(session_id=self.id))
        except RequestError as error:
            if error.status not in (404, 410):
                raise
        except CapacityError:
            return  # the engine is gone, and all sessions with it
        self._await_abandoned()

    def _ask(self, command: RewindSession | ForkSession | GetSession) -> SessionState:
        answer = self._engine.ask(command)
        assert isinstance(answer, SessionState), answer
        return answer

    def _pieces(
        self,
        given: Prompt | Messages | None,
        options: Options,
        number: int | None,
        *,
        generates: bool,
        call: ChatCall | None = None,
    ) -> Generator[Piece, None, None]:
        self._check_idle()
        turn = ClientTurn(self._session, self._language)
        if call is None:
            options = self._compiled(turn, given, options)
        tokens = self._input_tokens(turn, given, None if call is None else call.tools, generates=generates)
        request_id, tokenizer = self._engine.new_id(), self._language.tokenizer
        (submit,) = submits(request_id, tokens, options, tokenizer, TurnOf(session_id=self.id, number=number))
        if self._engine.has_journal:
            messages, listed, _ = turn.given
            note = note_of(turn.length_before, messages, listed, generates=generates)
            submit = replace(submit, known_len=turn.length_before, note=note)
        answer = Answer(tokenizer, options, None if call is None else call.form)
        sent = _SentTurn(turn=turn)
        self._engine.send(submit, sent.events.put)
        turn.on_sent()
        self._sent = sent
        try:
            while answer.finished is None:
                event = sent.events.get()
                turn.on_event(event)
                piece = answer.feed(checked(event))
                if piece is not None and piece.begun is None:
                    yield piece
        finally:
            # Not waited for here: an abandoned stream may be collected on any thread, the engine's own too.
            sent.is_abandoned = True
            if self._session.turn is turn:
                self._engine.abort(request_id)

    def _compiled(self, turn: ClientTurn, given: Prompt | Messages | None, options: Options) -> Options:
        """The options of a turn without tools, their grammar compiled; the model may think before an answer."""
        has_messages = _are_messages(given)
        if not turn.begins_answer(has_messages=has_messages, has_plain=given is not None and not has_messages):
            return compiled_options(self._engine, options)
        asked = ChatArguments(options=options, tools=None, tool_choice=None, schema=None)
        return read_chat(self._engine, self._formats, self._language.tokenizer, asked).options

    def _input_tokens(
        self, turn: ClientTurn, given: Prompt | Messages | None, tools: ToolRequest | None, *, generates: bool
    ) -> tuple[int, ...]:
        """The tokens that a caller's input adds to the session."""
        if given is None or isinstance(given, str):
            return turn.input_tokens(text=given, generates=generates)
        if not _are_messages(given):
            return turn.input_tokens(ids=_ids(given), generates=generates)
        formats = self._formats
        messages = formats.session_messages(as_messages(given), tools, self._language, turn.transcript)
        return turn.input_tokens(messages=messages, tools=formats.template_tools(tools), generates=generates)

    def _check_idle(self) -> None:
        """Wait for the end of an abandoned turn; refuse if a turn is still being read."""
        self._await_abandoned()
        if self._session.turn is not None:
            raise RequestError(409, "session_id", f"session {self.id!r} has a turn that has not ended")

    def _await_abandoned(self) -> None:
        """Wait for the end of an abandoned turn, if there is one."""
        sent = self._sent
        while sent is not None and sent.is_abandoned and self._session.turn is sent.turn:
            sent.turn.on_event(sent.events.get())


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
