"""Conversation: the tokens of a whole conversation, in which answers of the model keep the tokens it gave them.

A client that sends its whole history again sends text, and the tokens of a text need not be those that the model drew.
Where an answer's own tokens are known, they stand in its place: the template is rendered around them. An answer that
the template would write after something else than where answers begin, or from which it drops what the model thought,
is rendered like any other message. Never sees sessions. Called by the server.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from roost.text.escaping import ANSWER_MARK
from roost.text.language import EscapedMessage, Language

MEMO_CHARS_MAX = 2**21  # with their tokens some 20 MB
_ASKED: list[EscapedMessage] = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAnswer:
    """An answer of the model as it gave it."""

    tokens: tuple[int, ...]
    has_reasoning: bool = False  # then its tokens are kept only where the template writes all of its text


class TextMemo:
    """The tokens of texts between answers, which come again with every request of a conversation.

    Bounded by characters; the least recently used go first. Used on several threads.
    """

    def __init__(self, chars_max: int = MEMO_CHARS_MAX) -> None:
        self._chars_max = chars_max
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, int | None], tuple[int, ...]] = OrderedDict()
        self._num_chars = 0

    def tokens(self, language: Language, text: str, after: int | None, tokens_max: int | None) -> tuple[int, ...]:
        """The tokens of a rendered text after a special token, or after something else."""
        key = (text, after)
        with self._lock:
            if (known := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return known
        found = language.text_tokens(text, after=after, tokens_max=tokens_max)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = found
                self._num_chars += len(text)
            while self._num_chars > self._chars_max:
                (old, _), _ = self._kept.popitem(last=False)
                self._num_chars -= len(old)
        return found


def conversation_tokens(
    language: Language,
    messages: list[EscapedMessage],
    own: Mapping[int, OwnAnswer],
    memo: TextMemo,
    *,
    answers: bool = True,
    tools: list[dict[str, Any]] | None = None,
    tokens_max: int | None = None,
) -> tuple[int, ...]:
    """Tokens of a conversation; with `answers`, up to where the model's next answer begins.

    `messages` and `tools` are escaped; `own`: the answers whose tokens are known, by place among the messages.
    """
    own = _written_whole(language, messages, own, tools)
    generation_prompt = _generation_prompt(language) if own else ""
    while own:
        marked = [_marked(message) if place in own else message for place, message in enumerate(messages)]
        parts = language.chat_text(marked, add_generation_prompt=answers, tools=tools).split(ANSWER_MARK)
        if len(parts) != len(own) + 1:
            break
        befores = [_up_to_answer(part, generation_prompt) for part in parts[:-1]]
        if None not in befores:
            texts = [before for before in befores if before is not None]
            answers_given = [own[place] for place in sorted(own)]
            return _joined(language, memo, [*texts, parts[-1]], answers_given, tokens_max)
        pairs = zip(sorted(own), befores, strict=True)
        own = {place: own[place] for place, before in pairs if before is not None}
    text = language.chat_text(messages, add_generation_prompt=answers, tools=tools)
    return language.text_tokens(text, tokens_max=tokens_max)


def _written_whole(
    language: Language,
    messages: list[EscapedMessage],
    answers: Mapping[int, OwnAnswer],
    tools: list[dict[str, Any]] | None,
) -> dict[int, OwnAnswer]:
    """The answers of which the template drops nothing."""
    if not any(answer.has_reasoning for answer in answers.values()):
        return dict(answers)
    text = language.chat_text(messages, add_generation_prompt=True, tools=tools)
    own = {place: _text(language, answer) for place, answer in answers.items() if answer.has_reasoning}
    wanted = Counter(own.values())
    kept = {each for each, number in wanted.items() if text.count(each) >= number}
    return {place: answer for place, answer in answers.items() if place not in own or own[place] in kept}


def _text(language: Language, answer: OwnAnswer) -> str:
    """What an answer says, without the token that ended it."""
    tokens = answer.tokens[:-1] if _ended_by(language, answer) is not None else answer.tokens
    return language.tokenizer.decode(tokens, skip_special=False).strip()


def _marked(message: EscapedMessage) -> EscapedMessage:
    return {"role": message["role"], "content": ANSWER_MARK}


def _generation_prompt(language: Language) -> str:
    """What a template writes before an answer; '' if nothing of its own."""
    asked = language.chat_text(_ASKED, add_generation_prompt=True)
    return asked.removeprefix(language.chat_text(_ASKED, add_generation_prompt=False))


def _up_to_answer(before: str, generation_prompt: str) -> str | None:
    """The text before an answer without whitespace that is the answer's own; None if answers do not begin there."""
    if before.endswith(generation_prompt) and generation_prompt:
        return before
    stripped, prompt = before.rstrip(), generation_prompt.rstrip()
    if not stripped.endswith(prompt):
        return None
    return stripped.removesuffix(prompt) + generation_prompt


def _joined(
    language: Language, memo: TextMemo, texts: Sequence[str], answers: Sequence[OwnAnswer], tokens_max: int | None
) -> tuple[int, ...]:
    """The tokens of rendered texts with an answer after each but the last."""
    tokens = [*memo.tokens(language, texts[0], None, tokens_max)]
    for answer, text in zip(answers, texts[1:], strict=True):
        tokens += answer.tokens
        tokens += memo.tokens(language, text, _ended_by(language, answer), tokens_max)
    return tuple(tokens)


def _ended_by(language: Language, answer: OwnAnswer) -> int | None:
    """The special token that ended an answer, if one did."""
    last = answer.tokens[-1] if answer.tokens else None
    return last if last is not None and language.tokenizer.is_special(last) else None
