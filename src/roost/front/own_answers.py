"""Own answers: the tokens of answers that were given, found again by the conversation in which they were given.

A client that sends its whole history again sends the model's answers as messages. An answer is known by everything
that was said before it and by what it says, so the same conversation has the same tokens whoever looks it up, and no
name or session is part of that. Bounded by number and tokens; the least recently used go first. Answers are looked up
on any thread and kept on one. Called by the server.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from roost.text.conversation import OwnAnswer
from roost.tools.definitions import ToolRequest

ANSWERS_MAX = 2**16
TOKENS_MAX = 2**22  # of all answers, 4 bytes each
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The messages of a conversation as digests: each of everything up to and with one message."""

    begin: bytes
    digests: tuple[bytes, ...]

    @classmethod
    def of(
        cls, messages: Sequence[dict[str, Any]], tools: ToolRequest | None, *, client: str, cache_salt: str
    ) -> "History":
        """The history of plain messages, under a client's name and salt."""
        listed = [] if tools is None else [tool.definition() for tool in tools.tools]
        begin = found = _digest(b"", [client, cache_salt, listed])
        digests = []
        for message in messages:
            found = _digest(found, _said(message))
            digests.append(found)
        return cls(begin=begin, digests=tuple(digests))

    def after(self, message: dict[str, Any]) -> bytes:
        """The digest of everything with one more message."""
        return _digest(self.digests[-1] if self.digests else self.begin, _said(message))


class OwnAnswers:
    """All answers that are remembered."""

    def __init__(self, answers_max: int = ANSWERS_MAX, tokens_max: int = TOKENS_MAX) -> None:
        self._answers_max, self._tokens_max = answers_max, tokens_max
        self._kept: OrderedDict[bytes, tuple[array[int], bytes | None]] = OrderedDict()  # and what was thought
        self._num_tokens = 0

    def find(self, history: History, messages: Sequence[dict[str, Any]]) -> dict[int, OwnAnswer]:
        """The answers among the messages of a history whose tokens are known, by their number among all answers."""
        found: dict[int, OwnAnswer] = {}
        number = 0
        for message, digest in zip(messages, history.digests, strict=True):
            if message["role"] != "assistant":
                continue
            kept = self._kept.get(digest)
            if kept is not None and _thought(message) in (None, kept[1]):  # or the client has changed it
                with suppress(KeyError):  # another thread may have forgotten it meanwhile
                    self._kept.move_to_end(digest)
                found[number] = OwnAnswer(tokens=tuple(kept[0]), has_reasoning=kept[1] is not None)
            number += 1
        return found

    def keep(self, history: History, message: dict[str, Any], answer: OwnAnswer) -> None:
        """Remember the answer to a history."""
        digest = history.after(message)
        if (earlier := self._kept.pop(digest, None)) is not None:
            self._num_tokens -= len(earlier[0])
        self._kept[digest] = array("i", answer.tokens), _thought(message)
        self._num_tokens += len(answer.tokens)
        while len(self._kept) > self._answers_max or self._num_tokens > self._tokens_max:
            _, (tokens, _) = self._kept.popitem(last=False)
            self._num_tokens -= len(tokens)


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()


def _said(message: dict[str, Any]) -> list[Any]:
    """What a message says: ids of calls, and what was thought on the way, are not part of it."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], _value(function["arguments"])] for function in functions]
    return [message["role"], message.get("content") or "", calls]


def _thought(message: dict[str, Any]) -> bytes | None:
    """The digest of what was thought on the way, if a message has it."""
    thought = message.get("reasoning_content")
    return _digest(b"", thought.strip()) if thought else None


def _value(arguments: Any) -> Any:
    """Arguments as a value, so that it does not matter how a client writes them."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
