"""Continuation: what a conversation's next messages add to the tokens that a session already holds.

Owns the transcript of a session: its messages, turn by turn, with a stand-in for each answer, since the session has the
answer's own tokens. What the template adds after the last answer or message is the continuation. A template that is
known to be local renders only the beginning and the end for it, which costs the same in every turn; any other one
renders everything. Never sees the session's tokens. Called by the server and the library.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from roost.errors import RequestError
from roost.text.escaping import ANSWER_MARK
from roost.text.language import EscapedMessage, Language, num_chars
from roost.text.locality import OPENING

_ENDING = 4  # of the messages a session has, the last so many are always rendered


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transcript:
    """What a session holds after one of its turns; the turns before are linked, so that forks share them."""

    before: "Transcript | None" = None  # None: the empty session
    num_turns: int = 0
    length: int = 0  # tokens of the session
    messages: tuple[EscapedMessage, ...] = ()  # that this turn added; the last may be a stand-in for the answer
    is_chat: bool = True  # False: plain input, which no template can continue
    is_open: bool = False  # the model spoke last, and its message is not closed
    ended_by: int | None = None  # the special token that its answer ended with: the session's last
    num_messages: int = 0  # in all turns
    num_chars: int = 0  # of their contents
    opening: tuple[EscapedMessage, ...] = ()  # the first messages

    def add(
        self,
        language: Language,
        *,
        length: int,
        messages: Sequence[EscapedMessage] | None,
        output: Sequence[int] | None,
    ) -> "Transcript":
        """The transcript after one more turn: messages (None: plain input), and an answer unless it was an append."""
        goes_on = self.is_open and not messages  # nothing new was said: an answer got longer, if anything happened
        answers = output is not None and not goes_on
        last = output[-1] if output else None
        ended_by = last if last is not None and language.tokenizer.is_special(last) else None
        new = (*(messages or ()), *((_ANSWER_MESSAGE,) if answers else ()))
        return Transcript(
            before=self,
            num_turns=self.num_turns + 1,
            length=length,
            messages=new,
            is_chat=self.is_chat and messages is not None,
            is_open=answers or goes_on,
            ended_by=self.ended_by if goes_on and last is None else ended_by,
            num_messages=self.num_messages + len(new),
            num_chars=self.num_chars + num_chars(new),
            opening=(*self.opening, *new[: OPENING - len(self.opening)]),
        )

    def cut(self, length: int, num_turns: int) -> "Transcript":
        """The transcript of a session that was cut to so many tokens, of which so many turns are left."""
        found = self
        while found.before is not None and (found.num_turns > num_turns or found.length > length):
            found = found.before
        if found.length == length:
            return found
        # in the middle of a turn: what is there is no whole message
        return Transcript(before=found, num_turns=num_turns, length=length, is_chat=False, num_chars=found.num_chars)

    def said(self) -> list[EscapedMessage]:
        """All messages, the first one first."""
        return self._last(self.num_messages)

    def ends(self) -> list[EscapedMessage]:
        """The first and the last messages; those in the middle, an even number of them, are left out."""
        num_last = _ENDING + (self.num_messages - OPENING - _ENDING) % 2
        if self.num_messages <= OPENING + num_last:
            return self.said()
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
    tokens_max: int | None = None,
) -> tuple[int, ...]:
    """Tokens that new messages add; up to where the model speaks, if it is to answer."""
    if not transcript.is_chat:
        raise RequestError(
            400, "messages", "the session holds plain text or ids, which no template continues: send text or input_ids"
        )
    if not messages and transcript.is_open:
        return ()  # the answer goes on as it stands
    added = None
    if language.is_local and transcript.num_messages > OPENING + _ENDING:
        with suppress(RequestError):  # in the middle, ends may meet that the template would not have together
            added = _added(language, transcript, transcript.ends(), messages, answers=answers)
    if added is None:
        added = _added(language, transcript, transcript.said(), messages, answers=answers)
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
    said: list[EscapedMessage],
    messages: Sequence[EscapedMessage],
    *,
    answers: bool,
) -> str | None:
    """The text that new messages add to what was said; None if a conversation with them does not begin with that."""
    whole = language.chat_text([*said, *messages], add_generation_prompt=answers)
    if not said:
        return whole
    if not transcript.is_open:
        before = language.chat_text(said, add_generation_prompt=False)
        return whole.removeprefix(before) if whole.startswith(before) else None
    before = language.chat_text(said[:-1], add_generation_prompt=True)
    # a space before an answer is the model's own: its first token has it
    space, found, added = whole.removeprefix(before).partition(ANSWER_MARK)
    is_after = whole.startswith(before) and found and not space.strip() and ANSWER_MARK not in added
    return added if is_after else None
