"""A matcher allows what a request allows and nothing else, with markers as text and as added tokens."""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Inner

from roost.text.language import Language
from roost.text.tokenizer import Tokenizer
from roost.tools.definitions import ToolRequest
from roost.tools.model_formats import ModelFormats
from roost.tools.reasoning import ReasoningTags, after_reasoning
from roost.tools.tool_grammar import tool_grammar
from roost.weights.load import open_source
from roost.weights.pull import default_model
from tests.unit.tools.written import (
    BY_NAME,
    FIND,
    NOW,
    THINKS,
    THINKS_AT_ONCE,
    Call,
    complete,
    content,
    read,
    request,
    written,
)

llguidance = pytest.importorskip("llguidance")

FORMATS = sorted(BY_NAME)
BAD: Call = ("find", {"count": "many"})
FREE = "Well {x} [y] <tool? [TOOL"
NAMED = {"type": "function", "function": {"name": "now-2"}}


@cache
def language() -> Language:
    """The default model's."""
    return open_source(default_model()).language()


@cache
def tokenizer(*, has_markers: bool) -> Tokenizer:
    """The default model's; with markers as added tokens, special ones and others, or without any."""
    if not has_markers:
        return language().tokenizer
    parts = json.loads(language().tokenizer.to_json())
    inner = Inner.from_str(parts.pop("inner"))
    inner.add_special_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")])
    inner.add_tokens([AddedToken(text) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    return Tokenizer(inner, **parts)


@cache
def matcher_tokenizer(*, has_markers: bool) -> Any:
    """The same for llguidance."""
    given = tokenizer(has_markers=has_markers)
    inner = json.loads(given.to_json())["inner"]
    return llguidance.LLTokenizer(inner, n_vocab=given.vocab_size, eos_token=sorted(given.eos_ids))


@pytest.fixture(params=[False, True], ids=["as text", "as tokens"])
def has_markers(request: pytest.FixtureRequest) -> bool:
    """Whether the vocabulary has the markers as tokens."""
    return bool(request.param)


def allows(grammar: str, text: str, *, has_markers: bool) -> bool:
    """Whether a grammar allows a text as a whole output."""
    matcher = llguidance.LLMatcher(matcher_tokenizer(has_markers=has_markers), grammar, log_level=0)
    assert not matcher.is_error(), (matcher.get_error(), grammar)
    tokens = tokenizer(has_markers=has_markers).encode(text, special=True)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar_of(name: str, asked: ToolRequest, *, has_markers: bool) -> str:
    """The grammar of a request."""
    return tool_grammar(BY_NAME[name], asked, tokenizer(has_markers=has_markers))


@pytest.mark.parametrize("name", FORMATS)
def test_auto_allows_text_and_calls_by_their_schemas(name: str, has_markers: bool) -> None:
    grammar = grammar_of(name, request(), has_markers=has_markers)
    for text in ("", FREE, written(name, FIND), written(name, NOW), written(name, FIND, NOW, NOW)):
        assert allows(grammar, text, has_markers=has_markers), text
    for call in (BAD, ("find", {}), ("find", {"count": 1, "more": 2}), ("other", {})):
        assert not allows(grammar, written(name, call), has_markers=has_markers), call


@pytest.mark.parametrize("name", FORMATS)
def test_in_free_text_a_marker_opens_a_call_or_cannot_be_written(name: str, has_markers: bool) -> None:
    form = BY_NAME[name]
    for asked in (request(), request(parallel=False), request("none")):
        grammar = grammar_of(name, asked, has_markers=has_markers)
        if form.marker:
            assert not allows(grammar, f"Well, {form.marker} it is", has_markers=has_markers)
            spelt = "".join(form.marker[index] + "\u200b" for index in range(len(form.marker)))
            assert allows(grammar, f"Well, {spelt} it is", has_markers=has_markers)
        if form.first:
            assert not allows(grammar, f"\n{form.first} it is", has_markers=has_markers)
    if form.marker:
        after = f"Well, {form.marker}{written(name, NOW).removeprefix(form.marker)}"
        assert allows(grammar_of(name, request(), has_markers=has_markers), after, has_markers=has_markers)
        assert not allows(grammar_of(name, request("none"), has_markers=has_markers), after, has_markers=has_markers)


@pytest.mark.parametrize("name", [name for name in FORMATS if BY_NAME[name].between is not None])
def test_text_and_more_calls_may_follow_where_a_format_has_one_call_in_a_block(name: str, has_markers: bool) -> None:
    text = f"First {written(name, FIND)} then {written(name, NOW)} done"
    assert allows(grammar_of(name, request(), has_markers=has_markers), text, has_markers=has_markers)
    single = grammar_of(name, request(parallel=False), has_markers=has_markers)
    assert not allows(single, text, has_markers=has_markers)
    assert allows(single, f"First {written(name, FIND)} then", has_markers=has_markers)


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_comes_at_once(name: str, has_markers: bool) -> None:
    grammar = grammar_of(name, request("required"), has_markers=has_markers)
    assert allows(grammar, written(name, FIND), has_markers=has_markers)
    assert allows(grammar, written(name, NOW, FIND), has_markers=has_markers)
    for text in ("", FREE, " " + written(name, NOW), written(name, BAD)):
        assert not allows(grammar, text, has_markers=has_markers), text
    single = grammar_of(name, request("required", parallel=False), has_markers=has_markers)
    assert allows(single, written(name, NOW), has_markers=has_markers)
    assert not allows(single, written(name, NOW, NOW), has_markers=has_markers)


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_tool_is_called_once_and_no_other_is(name: str, has_markers: bool) -> None:
    grammar = grammar_of(name, request(NAMED), has_markers=has_markers)
    assert allows(grammar, written(name, NOW), has_markers=has_markers)
    for text in (FREE, written(name, FIND), written(name, NOW, NOW)):
        assert not allows(grammar, text, has_markers=has_markers), text


@pytest.mark.parametrize("name", FORMATS)
def test_none_allows_text_alone(name: str, has_markers: bool) -> None:
    grammar = grammar_of(name, request("none"), has_markers=has_markers)
    assert allows(grammar, FREE, has_markers=has_markers)
    assert not allows(grammar, written(name, NOW), has_markers=has_markers)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tags", [THINKS, THINKS_AT_ONCE], ids=["thinks", "thinks at once"])
def test_reasoning_is_free_and_the_answer_is_not(name: str, tags: ReasoningTags, has_markers: bool) -> None:
    begin = "" if tags.is_open else "<think>"
    auto, required = (
        after_reasoning(grammar_of(name, asked, has_markers=has_markers), tags, tokenizer(has_markers=has_markers))
        for asked in (request(), request("required"))
    )
    for thought in ("", "\nwell {x} [1]\n"):
        for grammar in (auto, required):
            good, bad = (f"{begin}{thought}</think>\n\n{written(name, call)}" for call in (FIND, BAD))
            assert allows(grammar, good, has_markers=has_markers)
            assert not allows(grammar, bad, has_markers=has_markers)
    assert allows(auto, f"{begin}well</think>\n\n{FREE}", has_markers=has_markers)
    assert not allows(required, f"{begin}well</think>\n\n{FREE}", has_markers=has_markers)
    assert not allows(required, f"{begin}well", has_markers=has_markers)
    assert allows(required, written(name, NOW), has_markers=has_markers) != tags.is_open


@pytest.mark.parametrize(
    "answer", ['start: "yes" | "no"', json.dumps({"grammars": [{"json_schema": {"enum": ["yes"]}}]})]
)
def test_reasoning_goes_before_a_grammar_of_either_form(answer: str) -> None:
    formats = ModelFormats(tool_format=BY_NAME["hermes"], is_described=True, reasoning=THINKS)
    grammar = formats.grammar(None, tokenizer(has_markers=False), answer=answer)
    yes = "yes" if answer.startswith("start") else '"yes"'
    assert allows(grammar, f"<think>hm</think>\n\n{yes}", has_markers=False)
    assert allows(grammar, yes, has_markers=False)
    assert not allows(grammar, "<think>hm</think>\n\nmaybe", has_markers=False)
    assert formats.grammar(None, tokenizer(has_markers=False)) == ""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("reasoning", [None, THINKS], ids=["plain", "thinks"])
def test_with_a_grammar_for_answers_there_are_calls_or_such_an_answer(
    name: str, reasoning: ReasoningTags | None, has_markers: bool
) -> None:
    formats = ModelFormats(tool_format=BY_NAME[name], is_described=False, reasoning=reasoning)
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    answer = json.dumps({"grammars": [{"json_schema": {**schema, "required": ["name"]}}]})
    said, thought = '{"name": "find", "age": 3}', "" if reasoning is None else "<think>hm</think>\n\n"

    def allowed(choice: object, text: str) -> bool:
        grammar = formats.grammar(request(choice), tokenizer(has_markers=has_markers), answer=answer)
        return allows(grammar, thought + text, has_markers=has_markers)

    for choice, calls, says in (("auto", True, True), ("required", True, False), ("none", False, True)):
        mark = "<|python_tag|>" if name == "llama3-json" else ""  # tells a call from an answer
        assert allowed(choice, mark + written(name, FIND, NOW)) == calls
        assert allowed(choice, said) == says
        for text in (FREE, mark + written(name, BAD), '{"age": 3}', said + written(name, NOW)):
            assert not allowed(choice, text), (choice, text)
    machine = formats.machine(request(), lambda: "", has_answer_grammar=True)
    said = '{"name": "find", "parameters": {}}'
    assert content([*machine.feed(said), *machine.end()]) == said


def test_whitespace_in_json_has_no_choice() -> None:
    grammar = grammar_of("hermes", request("required"), has_markers=False)
    text = written("hermes", ("find", {"count": 1, "flag": True}))
    for loose in (text.replace(": ", ":"), text.replace(", ", ",  "), text.replace("{", "{ ")):
        assert loose != text and not allows(grammar, loose, has_markers=False)


def test_a_schema_refers_to_its_own_definitions() -> None:
    colour = {"type": "string", "enum": ["red", "blue"]}
    properties = {"a": {"$ref": "#/$defs/Colour"}, "b": {"type": "array", "items": {"$ref": "#/$defs/Colour"}}}
    schema = {"type": "object", "properties": properties, "required": ["a", "b"], "$defs": {"Colour": colour}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for name in FORMATS:
        grammar = grammar_of(name, request("required", tools=tools), has_markers=False)
        assert allows(grammar, written(name, ("f", {"a": "red", "b": ["blue"]})), has_markers=False), name
        assert not allows(grammar, written(name, ("f", {"a": "green", "b": []})), has_markers=False), name
        assert not allows(grammar, written(name, ("f", {"a": "red", "b": ["green"]})), has_markers=False), name


@pytest.mark.parametrize(
    "odd", ['a"b', "a\\b", "\\n", "a\nb", "é🦉", "\u2028", "it's", "/x/", "}", "%json {", "<[5]>", "", "\x00"]
)
def test_values_and_names_may_have_any_characters(odd: str) -> None:
    by_value = {"type": "object", "properties": {"a": {"enum": [odd, "z"]}}, "required": ["a"]}
    by_name = {"type": "object", "properties": {odd: {"type": "integer"}}, "required": [odd]}
    for name in FORMATS:
        for schema, arguments in ((by_value, {"a": odd}), (by_name, {odd: 1})):
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            asked = request("required", tools=tools)
            if BY_NAME[name].unenforced(schema) is None:
                text = written(name, ("f", arguments))
                assert allows(grammar_of(name, asked, has_markers=False), text, has_markers=False), (name, schema)
                assert complete(read(name, [text], tools=asked.callable)) == [("f", arguments)]


def test_a_tool_without_listed_parameters_takes_any() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for name in FORMATS:
        grammar = grammar_of(name, request("required", tools=tools), has_markers=False)
        assert allows(grammar, written(name, ("f", {"any": 1, "more": "x"})), has_markers=False), name
        assert allows(grammar, written(name, ("f", {})), has_markers=False), name


def test_optional_parameters_may_be_left_out_in_any_way() -> None:
    values: dict[str, Any] = {"a": 1, "b": "x", "c": True}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**schema, "additionalProperties": False}}}]
    for name in FORMATS:
        grammar = grammar_of(name, request("required", tools=tools), has_markers=False)
        for chosen in range(2 ** len(values)):
            some = {key: value for index, (key, value) in enumerate(values.items()) if chosen >> index & 1}
            assert allows(grammar, written(name, ("f", some)), has_markers=False), (name, some)


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_matcher_allows_at_random_is_read_as_calls_by_their_schemas(name: str) -> None:
    """Walks through the grammar along tokens that it allows, and reads what comes out."""
    grammar = grammar_of(name, request("required", parallel=False), has_markers=True)
    own = tokenizer(has_markers=True)
    for step in range(4):
        matcher = llguidance.LLMatcher(matcher_tokenizer(has_markers=True), grammar, log_level=0)
        tokens: list[int] = []
        while not matcher.is_accepting() and len(tokens) < 60:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            ids = [id for id in range(own.vocab_size) if mask >> id & 1]
            tokens.append(ids[(len(tokens) * 7 + step * 13) % len(ids)])
            assert matcher.consume_token(tokens[-1])
        text = own.decode(tokens, skip_special=False)
        events = read(name, [text])
        assert content(events) == "", text
        if matcher.is_accepting():
            ((called, arguments),) = complete(events)
            assert called == "now-2" or type(arguments["count"]) is int
