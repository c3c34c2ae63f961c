"""Language: a model's tokenizer and chat template together, as one value that can travel.

Turns a prompt or a conversation into tokens. Special tokens of a conversation come from the template alone: what a
user writes stays text, whatever it spells. Called by the front end; written by the engine's process for the server's.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roost.errors import ConfigError, RequestError
from roost.text.template import TEXT_CHARS_MAX, ChatTemplate
from roost.text.tokenizer import Tokenizer

Hidden = dict[str, Any]  # a message in which marks stand for special tokens that its author spelt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Language:
    """How a model reads and writes."""

    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model knows no conversations

    def prompt_tokens(self, text: str, *, tokens_max: int | None = None) -> tuple[int, ...]:
        """Tokens of a plain prompt; one of more than `tokens_max` is refused, here and below."""
        return tuple(self.tokenizer.encode_prompt(text, tokens_max=tokens_max))

    def chat_tokens(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, tokens_max: int | None = None
    ) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the model speaks."""
        text = self.chat_text(self.hidden(messages), add_generation_prompt=add_generation_prompt)
        return self.text_tokens(text, tokens_max=tokens_max)

    def hidden(self, messages: Sequence[dict[str, Any]]) -> list[Hidden]:
        """Messages as templates may read them: what spells a special token is marked, so that it stays text."""
        length = num_chars(messages)
        if length > TEXT_CHARS_MAX:
            raise RequestError(
                413, "messages", f"{length} characters exceed the {TEXT_CHARS_MAX} that messages may have"
            )
        return [self.tokenizer.marks.hide(message) for message in messages]

    @property
    def is_local(self) -> bool:
        """Whether the end of a conversation is known to be written the same without its middle."""
        return self.template is not None and self.template.is_local

    def chat_text(self, messages: list[Hidden], *, add_generation_prompt: bool) -> str:
        """The text of a conversation, marks included."""
        if self.template is None:
            raise RequestError(400, "messages", "this model has no chat template; plain prompts work")
        return self.template.render(messages, add_generation_prompt=add_generation_prompt)

    def text_tokens(self, text: str, *, after: int | None = None, tokens_max: int | None = None) -> tuple[int, ...]:
        """Tokens of such a text, or of its end; a first token that is there already (`after`) is left out."""
        if after is None:
            return tuple(self._encode(text, tokens_max))
        last = _text_of(self.tokenizer, after)
        space, found, rest = text.partition(last)
        if not found or space.strip():
            return tuple(self._encode(text, tokens_max))
        return tuple(
            self._encode(last + rest, tokens_max)[1:]
        )  # read together: what follows a token is not a text's beginning

    def _encode(self, text: str, tokens_max: int | None) -> list[int]:
        """Tokens of a rendered text: special ones of the template's, plain ones where a user spelt one."""
        marks = self.tokenizer.marks
        shown = marks.show(text)
        if shown == text:
            return self.tokenizer.encode(text, special=True, tokens_max=tokens_max)
        self.tokenizer.check_len(shown, tokens_max)
        tokens: list[int] = []
        trusted = ""  # special tokens, and parts in which no user spelt one
        for part in self.tokenizer.split_special(text):
            plain = marks.show(part)
            if plain == part:
                trusted += part
                continue
            tokens += self.tokenizer.encode(trusted, special=True, tokens_max=tokens_max)
            tokens += self.tokenizer.encode(plain, special=False, goes_on=bool(tokens), tokens_max=tokens_max)
            trusted = ""
        return tokens + self.tokenizer.encode(trusted, special=True, tokens_max=tokens_max)

    def to_json(self) -> str:
        """Everything another process needs to build the same."""
        template = None if self.template is None else self.template.to_json()
        return json.dumps({"tokenizer": self.tokenizer.to_json(), "template": template})

    @classmethod
    def from_json(cls, text: str) -> "Language":
        """What `to_json` wrote."""
        parts = json.loads(text)
        template = None if parts["template"] is None else ChatTemplate.from_json(parts["template"])
        return cls(tokenizer=Tokenizer.from_json(parts["tokenizer"]), template=template)


def make_template(source: object, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a checkpoint: a text, or several by name, of which the default counts."""
    if isinstance(source, list):
        source = next((each.get("template") for each in source if each.get("name") == "default"), None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ConfigError(f"chat template: must be a text, got {type(source).__name__}")
    return ChatTemplate(
        source, bos=_text_of(tokenizer, tokenizer.bos_id), eos=_text_of(tokenizer, min(tokenizer.eos_ids, default=None))
    )


def num_chars(messages: Sequence[Hidden]) -> int:
    """Characters of messages' contents, as far as they are plain."""
    contents = (message.get("content") for message in messages)
    return sum(len(content) for content in contents if isinstance(content, str))


def _text_of(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
