"""Continuation: the tokens that new messages add to what a session already holds.

Owns the transcript of a session: its messages, turn by turn, with a placeholder for each answer, whose tokens the
session has. What the template writes after the last answer or message is the continuation. A template that is known to
be local (text.locality) renders only the first and last messages, so the cost does not grow with the history; any other
renders the whole conversation. Never sees the session's tokens. Called by the server and the library.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from roost.errors import RequestError
from roost.text.escaping import ANSWER_MARK
from roost.text.language import EscapedMessage, Language, num_chars
from roost.text.locality import OPENING

OTHER_TOOLS = "must be those of the session's first messages, or left out"
_ENDING = 4  # at least this many of the last messages are always rendered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transcript:
    """The messages of a session after one of its turns; a linked list of turns, so that forks share a prefix."""

    before: "Transcript | None" = None  # None: the empty session
    num_turns: int = 0
    length: int = 0  # tokens of the session
    messages: tuple[EscapedMessage, ...] = ()  # added by this turn; the last may be a placeholder for the answer
    is_chat: bool = True  # False: holds plain input, which no template can continue
    is_open: bool = False  # the last message is the model's answer, and the template has not closed it yet
    ended_by: int | None = None  # the special token that ended the answer, which is the session's last token
    num_messages: int = 0  # of all turns
    num_chars: int = 0  # of all their contents
    opening: tuple[EscapedMessage, ...] = ()  # the first messages
    tools: tuple[dict[str, Any], ...] = ()  # escaped: those that the template lists, given with the first messages

    def add(
        self,
        language: Language,
        *,
        length: int,
        messages: Sequence[EscapedMessage] | None,
        output: Sequence[int] | None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> "Transcript":
        """The transcript after one more turn.

        `messages`: None for plain input. `output`: tokens of the answer, None for an append. `tools`: escaped, of the
        conversation's first turn; a later turn has the same.
        """
        extends_answer = self.is_open and not messages  # no new message: at most the last answer got longer
        answers = output is not None and not extends_answer
        last = output[-1] if output else None
        ended_by = last if last is not None and language.tokenizer.is_special(last) else None
        new = (*(messages or ()), *((_ANSWER_MESSAGE,) if answers else ()))
        return Transcript(
            before=self,
            num_turns=self.num_turns + 1,
            length=length,
            messages=new,
            is_chat=self.is_chat and messages is not None,
            is_open=answers or extends_answer,
            ended_by=self.ended_by if extends_answer and last is None else ended_by,
            num_messages=self.num_messages + len(new),
            num_chars=self.num_chars + num_chars(new),
            opening=(*self.opening, *new[: OPENING - len(self.opening)]),
            tools=self.tools if self.num_messages else tuple(tools),
        )

    def cut(self, length: int, num_turns: int) -> "Transcript":
        """The transcript of the session after a rewind to `length` tokens, which leaves `num_turns` turns."""
        found = self
        while found.before is not None and (found.num_turns > num_turns or found.length > length):
            found = found.before
        if found.length == length:
            return found
        # cut inside a turn: the tokens that are left do not end with a complete message
        return Transcript(before=found, num_turns=num_turns, length=length, is_chat=False, num_chars=found.num_chars)

    def all_messages(self) -> list[EscapedMessage]:
        """All messages, oldest first."""
        return self._last(self.num_messages)

    def first_and_last(self) -> list[EscapedMessage]:
        """The first and the last messages; an even number of those in between is left out, for templates that count."""
        num_last = _ENDING + (self.num_messages - OPENING - _ENDING) % 2
        if self.num_messages <= OPENING + num_last:
            return self.all_messages()
        return [*self.opening, *self._last(num_last)]

    def _last(self, count: int) -> list[EscapedMessage]:
        turns: list[tuple[EscapedMessage, ...]] = []
        found: Transcript | None = self
        while found is not None and count > 0:
            turns.append(found.messages[-count:])
            count -= len(found.messages)
            found = found.before
        return [message for turn in reversed(turns) for message in turn]


_ANSWER_MESSAGE: EscapedMessage = {"role": "assistant", "content": ANSWER_MARK}


def continuation(
    language: Language,
    transcript: Transcript,
    messages: Sequence[EscapedMessage],
    *,
    answers: bool,
    tools: Sequence[dict[str, Any]] = (),
    tokens_max: int | None = None,
) -> tuple[int, ...]:
    """Tokens that new messages add; with `answers`, up to where the model's answer begins.

    `tools`: escaped; later turns may repeat those of the first or leave them out, and nothing else: the template has
    listed them already.
    """
    if not transcript.is_chat:
        raise RequestError(
            400,
            "messages",
            "the session holds plain text or ids, which a chat template cannot continue: send text or input_ids",
        )
    if not transcript.num_messages:
        transcript = replace(transcript, tools=tuple(tools))
    elif tools and tuple(tools) != transcript.tools:
        raise RequestError(400, "tools", OTHER_TOOLS)
    if not messages and transcript.is_open:
        return ()  # the model continues its last answer
    added = None
    if language.is_local and transcript.num_messages > OPENING + _ENDING:
        with suppress(RequestError):  # the template may refuse the gap: two users' messages in a row, say
            added = _added(language, transcript, transcript.first_and_last(), messages, answers=answers)
    if added is None:
        added = _added(language, transcript, transcript.all_messages(), messages, answers=answers)
    if added is None:
        raise RequestError(
            400,
            "messages",
            "this model's chat template writes earlier messages differently when later ones follow, so it cannot "
            "continue a session: send text or input_ids, or whole conversations without a session",
        )
    return language.text_tokens(added, after=transcript.ended_by, tokens_max=tokens_max)


def _added(
    language: Language,
    transcript: Transcript,
    earlier: list[EscapedMessage],
    messages: Sequence[EscapedMessage],
    *,
    answers: bool,
) -> str | None:
    """The text that new messages add to `earlier`; None if rendering them changes what was rendered before."""
    tools = list(transcript.tools) or None
    whole = language.chat_text([*earlier, *messages], add_generation_prompt=answers, tools=tools)
    if not earlier:
        return whole
    if not transcript.is_open:
        before = language.chat_text(earlier, add_generation_prompt=False, tools=tools)
        return whole.removeprefix(before) if whole.startswith(before) else None
    before = language.chat_text(earlier[:-1], add_generation_prompt=True, tools=tools)
    # Whitespace that the template puts before an answer is part of the answer's own first token.
    space, found, added = whole.removeprefix(before).partition(ANSWER_MARK)
    is_after = whole.startswith(before) and found and not space.strip() and ANSWER_MARK not in added
    return added if is_after else None
