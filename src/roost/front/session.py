"""Client session: a session as its clients know it. The engine has its tokens; here is what the next turn is made from.

Owns the session's id, the transcript that new messages are rendered after, the usage of each committed turn, and which
turn is in flight; says how input becomes tokens, when a turn becomes history, and how rewind and fork cut that. Never
waits and never sends: no threads, no asyncio. Used by the library's sessions and the server's, which add how they wait.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from roost.errors import RequestError
from roost.front.answer import RepeatedTurn
from roost.messages import Event, Finished, Refused, SessionState, Tokens, Usage
from roost.text.continuation import Transcript, continuation
from roost.text.language import EscapedMessage, Language

_COMMITTED = ("stop", "length")  # how a turn ends that becomes history


def is_committed(event: Event) -> bool:
    """Whether an event ends a turn, or a request, whose output is kept."""
    return isinstance(event, Finished) and event.reason in _COMMITTED


def check_committed(finished: Finished) -> None:
    """Refuse to answer as if a turn were history that was undone."""
    if not is_committed(finished):
        raise RequestError(409, "session_id", "the turn was ended before it was done; the session is where it was")


class ClientSession:
    """What a client knows of one open session."""

    def __init__(
        self,
        session_id: str,
        transcript: Transcript | None = None,
        usages: Sequence[Usage] = (),
        tokens: "array[int] | None" = None,
    ) -> None:
        self.id = session_id
        self.transcript = transcript or Transcript()
        self.usages = list(usages)  # of its committed turns
        self.tokens = tokens  # what it holds after them, where whole conversations are compared with it; None: not kept
        self.turn: ClientTurn | None = None  # sent, and its last event has not come

    def check_number(self, number: int | None) -> None:
        """Refuse a turn whose number a committed turn has, and say what that one cost."""
        if number is not None and number < len(self.usages):
            reason = f"turn {number} of session {self.id!r} is committed already"
            raise RepeatedTurn(409, "turn", reason, self.usages[number])

    def commit(self, transcript: Transcript, usage: Usage, new_tokens: Sequence[int]) -> None:
        """A turn has become history, with these tokens."""
        self.transcript = transcript
        self.usages.append(usage)
        if self.tokens is not None:
            self.tokens.extend(new_tokens)

    def rewind(self, state: SessionState) -> None:
        """The engine has cut the session back to this state."""
        self.transcript = self.transcript.cut(state.length, state.turns)
        del self.usages[state.turns :]
        if self.tokens is not None:
            del self.tokens[state.length :]

    def fork(self, new_id: str, length: int, num_turns: int) -> "ClientSession":
        """Another session with the first tokens and turns of this one, as the engine has made it."""
        tokens = None if self.tokens is None else self.tokens[:length]
        return ClientSession(new_id, self.transcript.cut(length, num_turns), self.usages[:num_turns], tokens)


class ClientTurn:
    """One turn of a session, from its input to its last event."""

    def __init__(self, session: ClientSession, language: Language) -> None:
        self._session = session
        self._language = language
        self._messages: Sequence[EscapedMessage] | None = None  # escaped; None: plain input
        self._tools: Sequence[dict[str, Any]] = ()  # escaped: those that the template lists
        self._generates = False
        self._input: tuple[int, ...] = ()
        self._output: list[int] = []

    @property
    def transcript(self) -> Transcript:
        """The session's messages before this turn."""
        return self._session.transcript

    @property
    def length_before(self) -> int:
        """Tokens that the session holds before this turn."""
        return self.transcript.length

    @property
    def given(self) -> tuple[Sequence[EscapedMessage] | None, Sequence[dict[str, Any]], bool]:
        """Its messages, None for plain input, its tools, and whether it generates; once its input is known."""
        return self._messages, self._tools, self._generates

    def begins_answer(self, *, has_messages: bool, has_plain: bool) -> bool:
        """Whether the model's answer to messages begins with this turn: of new ones, or of those appended before."""
        transcript = self.transcript
        waits = bool(transcript.num_messages) and transcript.is_chat and not transcript.is_open
        return has_messages or (waits and not has_plain)

    def input_tokens(
        self,
        *,
        text: str | None = None,
        ids: Sequence[int] | None = None,
        messages: Sequence[dict[str, Any]] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        generates: bool,
        tokens_max: int | None = None,
    ) -> tuple[int, ...]:
        """The tokens that input in one of its forms, or none, adds to the session.

        Without anything new the model goes on, or answers the messages that were appended. Only a session's first text
        begins as a prompt does. `tools` are listed by the template with the first messages.
        """
        self._generates = generates
        self._input = self._tokens_of(text, ids, messages, tools, tokens_max)
        return self._input

    def _tokens_of(
        self,
        text: str | None,
        ids: Sequence[int] | None,
        messages: Sequence[dict[str, Any]] | None,
        tools: Sequence[dict[str, Any]] | None,
        tokens_max: int | None,
    ) -> tuple[int, ...]:
        is_chat, length = self.transcript.is_chat, self.length_before
        if messages is None and not text and not ids and is_chat and length:
            messages = ()
        if messages is not None:
            self._tools = self._language.escape_tools(tools) or ()
            return self._chat_tokens(messages, tokens_max)
        self._messages = None
        if text is None:
            return tuple(ids or ())
        if not length:
            return self._language.prompt_tokens(text, tokens_max=tokens_max)
        return tuple(self._language.tokenizer.encode(text, special=False, tokens_max=tokens_max))

    def on_sent(self) -> None:
        """The turn is on its way to the engine."""
        assert self._session.turn is None, self._session.id
        self._session.turn = self

    def on_event(self, event: Event) -> None:
        """Take the turn's next event; the last one says whether it has become history."""
        if isinstance(event, Tokens):
            self._output += event.tokens
        elif isinstance(event, Finished | Refused):
            if isinstance(event, Finished) and is_committed(event):
                self._commit(event.usage)
            self._session.turn = None

    def _chat_tokens(self, messages: Sequence[dict[str, Any]], tokens_max: int | None) -> tuple[int, ...]:
        self._messages = self._language.escape(messages)
        return continuation(
            self._language,
            self.transcript,
            self._messages,
            answers=self._generates,
            tools=self._tools,
            tokens_max=tokens_max,
        )

    def _commit(self, usage: Usage) -> None:
        transcript = self.transcript.add(
            self._language,
            length=usage.prompt_tokens + usage.completion_tokens,
            messages=self._messages,
            output=self._output if self._generates else None,
            tools=self._tools,
        )
        self._session.commit(transcript, usage, (*self._input, *self._output))
