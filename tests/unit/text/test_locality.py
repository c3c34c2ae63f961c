"""A turn's messages are rendered with the ends of a conversation alone where the template allows it, and never else."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.errors import RequestError
from roost.text.language import Language
from roost.text.locality import OPENING
from roost.text.template import ChatTemplate
from tests.support.chat_templates import COUNTING, LOCAL, OTHERS
from tests.support.small_vocabularies import byte_level
from tests.unit.text.test_continuation import Held

TOKENIZER = byte_level(bos_token_id=0)
LOOP = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


class Watched(ChatTemplate):
    """A template that counts the messages it renders at a time; unless it is local, it never is."""

    def __init__(self, source: str, *, is_local: bool = True) -> None:
        super().__init__(source, bos="<|endoftext|>", eos="<|im_end|>")
        self.is_local = self.is_local and is_local
        self.most = 0

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, tools: Any = None) -> str:
        """The text, counted."""
        self.most = max(self.most, len(messages))
        return super().render(messages, add_generation_prompt=add_generation_prompt, tools=tools)


@cache
def _language(source: str, *, is_local: bool) -> Language:
    return Language(tokenizer=TOKENIZER, template=Watched(source, is_local=is_local))


def _held(source: str, *, is_local: bool = True) -> Held:
    return Held(_language(source, is_local=is_local))


def _turn(held: Held, messages: tuple[dict[str, Any], ...], output: str | None) -> str:
    """What became of a turn."""
    ids = None if output is None else TOKENIZER.encode(output, special=True)
    try:
        held._add(messages, ids)
    except RequestError as error:
        return str(error)
    return str(held.tokens)


contents = st.sampled_from(["", " hello ", "12\n", "<|im_end|>", "\U000f0000", "{{ x }}"])
roles = st.sampled_from(["user", "assistant", "system", "user", "user"])
messages = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, roles, contents), max_size=3)
turns = st.lists(st.tuples(messages.map(tuple), st.sampled_from([None, "fine<|im_end|>", "", " cut"])), max_size=8)
talks = st.lists(contents, min_size=4, max_size=12)  # one question, one answer


@pytest.mark.parametrize("source", [*LOCAL.values(), *OTHERS.values()], ids=[*LOCAL, *OTHERS])
@settings(deadline=None, max_examples=60)
@given(turns=turns)
def test_the_ends_of_a_conversation_add_what_the_whole_of_it_adds(
    source: str, turns: list[tuple[tuple[dict[str, Any], ...], str | None]]
) -> None:
    ends, whole = _held(source), _held(source, is_local=False)
    for new, output in turns:
        assert _turn(ends, new, output) == _turn(whole, new, output)


@pytest.mark.parametrize("source", [*LOCAL.values(), *OTHERS.values()], ids=[*LOCAL, *OTHERS])
@pytest.mark.parametrize("has_system", [False, True])
@settings(deadline=None, max_examples=20)
@given(talk=talks)
def test_questions_and_answers_add_what_the_whole_conversation_adds(
    source: str, has_system: bool, talk: list[str]
) -> None:
    ends, whole = _held(source), _held(source, is_local=False)
    before: tuple[dict[str, Any], ...] = ({"role": "system", "content": "be <|im_end|> brief"},) if has_system else ()
    for text in talk:
        new = (*before, {"role": "user", "content": text})
        assert _turn(ends, new, "fine<|im_end|>") == _turn(whole, new, "fine<|im_end|>")
        before = ()


@pytest.mark.parametrize("source", LOCAL.values(), ids=LOCAL)
def test_a_turn_costs_the_same_however_long_its_history_is(source: str) -> None:
    template = Watched(source)
    held = Held(Language(tokenizer=TOKENIZER, template=template))
    assert template.is_local
    for _ in range(200):
        held.answer({"role": "user", "content": "hello"}, text="fine")
    assert len(held.transcript.all_messages()) == 400
    assert template.most <= OPENING + 7


@pytest.mark.parametrize(
    "source",
    [
        *OTHERS.values(),
        LOOP.replace("m.content", "m.content ~ loop.length"),
        LOOP.replace("m.content", "m.content ~ loop.revindex"),
        LOOP.replace("m.content", "m.content ~ loop.index"),
        LOOP.replace("m.content", "m.content if loop.index0 < 3 else '-'"),
        LOOP.replace("m.content", "m.content if loop.index0 % 3 else '-'"),
        LOOP.replace("m.content", "m.content ~ loop.cycle('a', 'b')"),
        LOOP.replace("m.content", "messages[4].content"),
        LOOP.replace("m.content", "messages[loop.index0 - 3].content"),
        LOOP.replace("m.content", "messages | map(attribute='content') | join"),
        LOOP.replace("in messages", "in messages if m.role != 'system'"),
        LOOP.replace("in messages", "in messages | reverse"),
        LOOP.replace("in messages", "in messages[::2]"),
        LOOP.replace("in messages", "in messages recursive"),
        LOOP.replace("{{", "{% if m.content == 'stop' %}{% break %}{% endif %}{{"),
        LOOP.replace("{% for", "{% set c = cycler('a', 'b') %}{% for").replace("m.content", "c.next()"),
        LOOP.replace("{% for", "{% set c = ['a', 'b'] | select %}{% for").replace("m.content", "c | first"),
        LOOP + LOOP,
        "{% set x %}" + LOOP + "{% endset %}{{ x[-20:] }}",
        "{% filter upper %}" + LOOP + "{% endfilter %}",
        "{% macro all() %}" + LOOP + "{% endmacro %}{{ all() }}{{ all() }}",
        "{% for n in [1, 2] %}" + LOOP + "{% endfor %}",
        "{% set m = messages | length %}{{ m }}" + LOOP,
        LOOP + "{{ messages[-3].content }}",
    ],
)
def test_a_template_that_may_look_further_renders_everything(source: str) -> None:
    assert not ChatTemplate(source, bos="", eos="").is_local


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        LOOP.replace("m.content", "m.content if loop.index0 < 2 else '-'"),
        LOOP.replace("m.content", "messages[3].content"),
        LOOP + "{{ messages[-2].content }}",
        "{% if tools %}t{% else %}" + LOOP + "{% endif %}",
    ],
)
def test_a_template_that_looks_no_further_is_known_to(source: str) -> None:
    assert ChatTemplate(source, bos="", eos="").is_local


def test_a_session_whose_template_counts_turns_counts_all_of_them() -> None:
    held = _held(COUNTING)
    for _ in range(20):
        held.answer({"role": "user", "content": "a"}, text="b", end="")
    assert "[38]" in TOKENIZER.decode(held.tokens, skip_special=False)
