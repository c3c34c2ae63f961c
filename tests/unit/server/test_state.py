"""What is too long for the context is refused before it is rendered or tokenised, and long texts go beside the loop."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from roost.errors import RequestError
from roost.server.background_threads import INLINE_MAX
from roost.server.config import ServerConfig
from roost.server.engine_process import EngineProcess
from roost.server.inputs import plain_messages
from roost.server.schema import Message
from roost.server.state import MESSAGE_COST, ServerState
from roost.text.language import Language
from roost.text.template import TEXT_CHARS_MAX, ChatTemplate
from roost.tools.hermes import HERMES
from roost.tools.model_formats import ModelFormats
from tests.support.small_vocabularies import byte_level
from tests.unit.text.test_template import CHAT

CONTEXT = 512


class Untouched:
    """Stands for what must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


def _server(template: Any = None, inner: Any = None) -> ServerState:
    tokenizer = byte_level()
    if inner is not None:
        tokenizer._inner = tokenizer._plain = inner
    language = Language(tokenizer=tokenizer, template=template or ChatTemplate(CHAT, bos="", eos="<|im_end|>"))
    server = ServerState(ServerConfig(), cast(EngineProcess, SimpleNamespace(started=SimpleNamespace(context=CONTEXT))))
    server._language = language
    server._formats = ModelFormats(tool_format=HERMES, is_described=True)
    return server


def _refusal(work: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        asyncio.run(work)
    return refused.value


def test_a_text_that_can_never_fit_is_refused_before_it_is_tokenised() -> None:
    server = _server(inner=Untouched())
    bounds = server.language.tokenizer.token_bounds
    assert bounds is not None
    text = "a" * (bounds.size * CONTEXT + 1)
    for given in (text, [text], [text] * 3):
        error = _refusal(server.prompt_tokens(given, "prompt"))
        assert (error.status, error.param) == (413, "prompt") and f"--context {CONTEXT}" in error.reason
    error = _refusal(server.chat_tokens([{"role": "user", "content": text}], "messages"))
    assert (error.status, error.param) == (413, "messages") and f"--context {CONTEXT}" in error.reason


def test_more_ids_than_the_context_holds_are_refused_at_once() -> None:
    error = _refusal(_server().prompt_tokens([1] * (CONTEXT + 1), "input_ids"))
    assert (error.status, error.param) == (413, "input_ids") and f"prompt of {CONTEXT + 1} tokens" in error.reason
    error = _refusal(_server().prompt_tokens([[1]] * (CONTEXT + 1), "input_ids"))
    assert (error.status, error.param) == (400, "input_ids") and "1 to 256 prompts" in error.reason


def test_more_messages_or_characters_than_any_conversation_has_are_refused_before_they_are_rendered() -> None:
    server = _server(template=Untouched())
    error = _refusal(plain_messages(server, [Message(role="user", content="")] * (CONTEXT + 1)))
    assert (error.status, error.param) == (413, "messages") and f"{CONTEXT + 1} messages exceed" in error.reason
    error = _refusal(server.chat_tokens([{"role": "user", "content": "a" * (TEXT_CHARS_MAX + 1)}], "messages"))
    assert (error.status, error.param) == (413, "messages") and "characters" in error.reason


class Told(ChatTemplate):
    """A template that says on which thread it was rendered."""

    thread = 0

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, tools: Any = None) -> str:
        """The text."""
        self.thread = threading.get_ident()
        return super().render(messages, add_generation_prompt=add_generation_prompt, tools=tools)


@pytest.mark.parametrize(
    ("num_messages", "content"),
    [(1, "h" * (INLINE_MAX - MESSAGE_COST)), (INLINE_MAX // MESSAGE_COST, "")],
    ids=["long", "many"],
)
def test_long_conversations_are_rendered_beside_the_event_loop(num_messages: int, content: str) -> None:
    template = Told(CHAT, bos="", eos="<|im_end|>")
    messages = [{"role": "user", "content": content}] * num_messages
    for said, is_beside in ((messages, False), ([*messages, {"role": "user", "content": ""}], True)):
        _refusal(_server(template=template).chat_tokens(said, "messages"))
        assert (template.thread != threading.get_ident()) == is_beside
