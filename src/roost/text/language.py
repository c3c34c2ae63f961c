"""Language: a model's tokenizer and chat template as one value that can be sent to another process.

Turns a prompt or a conversation into tokens. Special tokens of a conversation come from the template alone: what a
user writes stays text, whatever it spells. Called by the server and the library; the engine's process sends it to the
server's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roost.errors import ConfigError, RequestError
from roost.text.template import TEXT_CHARS_MAX, ChatTemplate
from roost.text.tokenizer import Tokenizer

EscapedMessage = dict[str, Any]  # a message in which the special tokens that its author spelt are escaped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Language:
    """A tokenizer and, if the model has one, a chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model takes plain prompts only

    def prompt_tokens(self, text: str, *, tokens_max: int | None = None) -> tuple[int, ...]:
        """Tokens of a plain prompt; more than `tokens_max` of them are refused, as in the methods below."""
        return tuple(self.tokenizer.encode_prompt(text, tokens_max=tokens_max))

    def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        tokens_max: int | None = None,
    ) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the model's answer begins."""
        escaped = self.escape_tools(tools)
        text = self.chat_text(self.escape(messages), add_generation_prompt=add_generation_prompt, tools=escaped)
        return self.text_tokens(text, tokens_max=tokens_max)

    def escape(self, messages: Sequence[dict[str, Any]]) -> list[EscapedMessage]:
        """Messages as templates may read them: what spells a special token is escaped, so that it stays text."""
        length = num_chars(messages)
        if length > TEXT_CHARS_MAX:
            raise RequestError(
                413, "messages", f"{length} characters exceed the {TEXT_CHARS_MAX} that messages may have"
            )
        return [self.tokenizer.escaper.escape(message) for message in messages]

    def escape_tools(self, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Definitions of tools as templates may read them, escaped as messages are."""
        return None if tools is None else [self.tokenizer.escaper.escape(tool) for tool in tools]

    @property
    def is_local(self) -> bool:
        """Whether the template is known to write the end of a conversation the same way without its middle."""
        return self.template is not None and self.template.is_local

    def chat_text(
        self,
        messages: list[EscapedMessage],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The rendered text of a conversation, still escaped; `tools` are escaped too."""
        if self.template is None:
            raise RequestError(400, "messages", "this model has no chat template; plain prompts work")
        return self.template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def text_tokens(self, text: str, *, after: int | None = None, tokens_max: int | None = None) -> tuple[int, ...]:
        """Tokens of a rendered text, or of its end; `after`: the token that precedes it already and is not repeated."""
        if after is None:
            return tuple(self._encode(text, tokens_max))
        last = _text_of(self.tokenizer, after)
        space, found, rest = text.partition(last)
        if not found or space.strip():
            return tuple(self._encode(text, tokens_max))
        # Encoded together with that token: some tokenizers treat the beginning of a text differently.
        return tuple(self._encode(last + rest, tokens_max)[1:])

    def _encode(self, text: str, tokens_max: int | None) -> list[int]:
        """Tokens of a rendered text: special tokens where the template wrote them, plain ones where a user did."""
        escaper = self.tokenizer.escaper
        unescaped = escaper.unescape(text)
        if unescaped == text:
            return self.tokenizer.encode(text, special=True, tokens_max=tokens_max)
        self.tokenizer.check_len(unescaped, tokens_max)
        tokens: list[int] = []
        trusted = ""  # special tokens of the template, and parts in which nothing was escaped
        for part in self.tokenizer.split_special(text):
            plain = escaper.unescape(part)
            if plain == part:
                trusted += part
                continue
            tokens += self.tokenizer.encode(trusted, special=True, tokens_max=tokens_max)
            tokens += self.tokenizer.encode(plain, special=False, is_continuation=bool(tokens), tokens_max=tokens_max)
            trusted = ""
        return tokens + self.tokenizer.encode(trusted, special=True, tokens_max=tokens_max)

    def to_json(self) -> str:
        """Everything another process needs to build an equal one."""
        template = None if self.template is None else self.template.to_json()
        return json.dumps({"tokenizer": self.tokenizer.to_json(), "template": template})

    @classmethod
    def from_json(cls, text: str) -> "Language":
        """What `to_json` wrote."""
        parts = json.loads(text)
        template = None if parts["template"] is None else ChatTemplate.from_json(parts["template"])
        return cls(tokenizer=Tokenizer.from_json(parts["tokenizer"]), template=template)


def make_template(source: object, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a checkpoint: a text, or a list of named ones, of which `default` is taken."""
    if isinstance(source, list):
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"chat template: must be a text, got {type(source).__name__}")
    return ChatTemplate(
        source, bos=_text_of(tokenizer, tokenizer.bos_id), eos=_text_of(tokenizer, min(tokenizer.eos_ids, default=None))
    )


def num_chars(messages: Sequence[EscapedMessage]) -> int:
    """Characters in the messages' contents and tool calls."""
    return sum(text_len(message.get("content")) + text_len(message.get("tool_calls")) for message in messages)


def text_len(value: Any) -> int:
    """Characters of the texts in a value, at any depth."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(text_len(key) + text_len(each) for key, each in value.items())
    return sum(map(text_len, value)) if isinstance(value, list) else 0


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
