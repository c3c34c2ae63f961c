"""Continuation: what a conversation's next messages add to the tokens that a session already holds.

Owns the transcript of a session: its messages, turn by turn, with a stand-in for each answer, since the session has the
answer's own tokens. The template renders all of it; what it adds after the last answer or message is the continuation.
Never sees the session's tokens. Called by the server and the library.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roost.errors import RequestError
from roost.text.language import Hidden, Language
from roost.text.marks import ANSWER


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transcript:
    """What a session holds after one of its turns; the turns before are linked, so that forks share them."""

    before: "Transcript | None" = None  # None: the empty session
    num_turns: int = 0
    length: int = 0  # tokens of the session
    messages: tuple[Hidden, ...] = ()  # that this turn added; the last may be a stand-in for the answer
    is_chat: bool = True  # False: plain input, which no template can continue
    is_open: bool = False  # the model spoke last, and its message is not closed
    ended_by: int | None = None  # the special token that its answer ended with: the session's last

    def add(
        self, language: Language, *, length: int, messages: Sequence[Hidden] | None, output: Sequence[int] | None
    ) -> "Transcript":
        """The transcript after one more turn: messages (None: plain input), and an answer unless it was an append."""
        goes_on = self.is_open and not messages  # nothing new was said: an answer got longer, if anything happened
        answers = output is not None and not goes_on
        last = output[-1] if output else None
        ended_by = last if last is not None and language.tokenizer.is_special(last) else None
        return Transcript(
            before=self,
            num_turns=self.num_turns + 1,
            length=length,
            messages=(*(messages or ()), *((_ANSWER,) if answers else ())),
            is_chat=self.is_chat and messages is not None,
            is_open=answers or goes_on,
            ended_by=self.ended_by if goes_on and last is None else ended_by,
        )

    def cut(self, length: int, num_turns: int) -> "Transcript":
        """The transcript of a session that was cut to so many tokens, of which so many turns are left."""
        found = self
        while found.before is not None and (found.num_turns > num_turns or found.length > length):
            found = found.before
        if found.length == length:
            return found
        # in the middle of a turn: what is there is no whole message
        return Transcript(before=found, num_turns=num_turns, length=length, is_chat=False)

    def said(self) -> list[Hidden]:
        """All messages, the first one first."""
        turns = []
        found: Transcript | None = self
        while found is not None:
            turns.append(found.messages)
            found = found.before
        return [message for turn in reversed(turns) for message in turn]


_ANSWER: Hidden = {"role": "assistant", "content": ANSWER}


def continuation(
    language: Language, transcript: Transcript, messages: Sequence[Hidden], *, answers: bool
) -> tuple[int, ...]:
    """Tokens that new messages add; up to where the model speaks, if it is to answer."""
    if not transcript.is_chat:
        raise RequestError(
            400, "messages", "the session holds plain text or ids, which no template continues: send text or input_ids"
        )
    if not messages and transcript.is_open:
        return ()  # the answer goes on as it stands
    said = transcript.said()
    whole = language.chat_text([*said, *messages], add_generation_prompt=answers)
    added = _after(language, transcript, said, whole)
    if added is None:
        raise RequestError(
            400,
            "messages",
            "this model's chat template writes earlier messages differently when later ones follow, so it cannot "
            "continue a session: send text or input_ids, or whole conversations without a session",
        )
    return language.text_tokens(added, after=transcript.ended_by)


def _after(language: Language, transcript: Transcript, said: list[Hidden], whole: str) -> str | None:
    """The text of a conversation after what was said; None if it does not begin with that."""
    if not said:
        return whole
    if not transcript.is_open:
        before = language.chat_text(said, add_generation_prompt=False)
        return whole.removeprefix(before) if whole.startswith(before) else None
    before = language.chat_text(said[:-1], add_generation_prompt=True)
    # a space before an answer is the model's own: its first token has it
    space, found, added = whole.removeprefix(before).partition(ANSWER)
    return added if whole.startswith(before) and found and not space.strip() else None
