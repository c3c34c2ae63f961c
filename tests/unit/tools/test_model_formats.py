"""A model's chat template shows how it writes calls and thoughts; one that knows no tools is told of them in words."""

import json
from typing import Any

import pytest

from roost.errors import ConfigError, RequestError
from roost.text.continuation import Transcript
from roost.text.language import Language
from roost.text.template import ChatTemplate
from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import Tool, ToolRequest
from roost.tools.format import CallSink, ToolFormat
from roost.tools.history import system_text
from roost.tools.json_calls import json_calls, read_json_call
from roost.tools.lark import Lark
from roost.tools.model_formats import ModelFormats, formats_of
from roost.tools.registry import FORMATS, detect, tool_format_names
from tests.support.chat_templates import LOCAL, OTHERS
from tests.support.small_vocabularies import byte_level
from tests.support.tool_templates import ARGUMENTS_FIRST, MISTRAL, QWEN3, UNKNOWN, WITH_TOOLS
from tests.unit.text.test_template import CHAT
from tests.unit.tools.written import BY_NAME, THINKS, complete, content, read, request

ASKED = {"role": "user", "content": "How many?"}
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"count": 1, "text": "é"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "now-2", "arguments": "{}"}},
]
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": CALLS}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "12"}
TOLD_TOO = {"role": "tool", "tool_call_id": "call_2", "content": "noon"}
HISTORY = [ASKED, CALLED, TOLD, TOLD_TOO]


def language(source: str | None) -> Language:
    """A vocabulary with a template."""
    template = None if source is None else ChatTemplate(source, bos="<s>", eos="</s>")
    return Language(tokenizer=byte_level(), template=template)


@pytest.mark.parametrize("name", sorted(WITH_TOOLS))
def test_a_format_is_told_from_what_the_template_writes(name: str) -> None:
    formats = formats_of(language(WITH_TOOLS[name]))
    assert (formats.name, formats.is_described, formats.reasoning) == (name, False, None)
    assert formats.template_tools(request()) == [tool.definition() for tool in request().tools]


def test_a_call_may_have_its_arguments_before_its_name() -> None:
    assert formats_of(language(ARGUMENTS_FIRST)).name == "hermes"
    text = '<tool_call>\n{ "arguments": {"count": 1}, "name": "find"}\n</tool_call>'
    assert complete(read("hermes", [text])) == [("find", {"count": 1})]
    assert content(read("hermes", [text.replace("find", "other")])) == text.replace("find", "other")


@pytest.mark.parametrize("name", sorted({*WITH_TOOLS} - {"llama3-json"}))
def test_what_a_template_writes_of_a_history_is_what_the_format_reads(name: str) -> None:
    template = ChatTemplate(WITH_TOOLS[name], bos="", eos="")
    formats = formats_of(language(WITH_TOOLS[name]))
    tools = formats.template_tools(request())
    messages = formats.messages(HISTORY, request())
    before = template.render(messages[:1], add_generation_prompt=True, tools=tools)
    after = template.render(messages[:2], add_generation_prompt=False, tools=tools)
    assert after.startswith(before)
    assert complete(read(name, [after.removeprefix(before)])) == [("find", {"count": 1, "text": "é"}), ("now-2", {})]
    assert "noon" in template.render(messages, add_generation_prompt=True, tools=tools)


@pytest.mark.parametrize("source", [*LOCAL.values(), *OTHERS.values(), UNKNOWN, None])
def test_a_template_that_writes_no_calls_that_are_known_has_its_tools_described(source: str | None) -> None:
    formats = formats_of(language(source))
    assert formats.name == "described" and formats.template_tools(request()) is None


def test_a_new_format_is_found_where_it_is_written() -> None:
    def read_loud(chars: Chars, calls: CallSink) -> Reading[None]:
        yield from read_json_call(chars, calls)
        yield from chars.expect("\n<|/call|>")

    def block(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
        return json_calls(lark, request.callable, "arguments")

    loud = ToolFormat(name="loud", marker="<|call|>", between="\n", read=read_loud, block=block)
    render = ChatTemplate(UNKNOWN, bos="", eos="").render
    assert detect(render) is None and detect(render, [*FORMATS, loud]) is loud


def test_flags_name_formats() -> None:
    assert tool_format_names() == ("auto", "described", *(format.name for format in FORMATS))
    assert formats_of(language(WITH_TOOLS["hermes"]), tool_format="qwen3-coder").name == "qwen3-coder"
    assert formats_of(language(WITH_TOOLS["hermes"]), tool_format="described").is_described
    with pytest.raises(ConfigError, match="--tool-format hermes: the chat template lists no tools"):
        formats_of(language(CHAT), tool_format="hermes")


def test_reasoning_is_told_from_what_the_template_writes() -> None:
    assert formats_of(language(QWEN3)).reasoning == THINKS and formats_of(language(QWEN3)).name == "hermes"
    assert formats_of(language(WITH_TOOLS["hermes"])).reasoning is None
    opened = formats_of(language(CHAT.replace("assistant\\n'", "assistant\\n<think>\\n'"))).reasoning
    assert opened is not None and opened.is_open
    left_out = CHAT.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
    assert formats_of(language(left_out)).reasoning == THINKS
    assert formats_of(language(left_out), reasoning_format="none").reasoning is None
    assert formats_of(language(CHAT), reasoning_format="think").reasoning == THINKS


def test_tools_that_a_template_does_not_know_become_words() -> None:
    formats = formats_of(language(CHAT))
    messages = formats.messages([{"role": "system", "content": "Be brief."}, *HISTORY], request())
    system, asked, called, told = messages
    assert system == {"role": "system", "content": "Be brief.\n\n" + system_text(request().tools)}
    assert asked == ASKED
    assert complete(read("hermes", [called["content"]])) == [("find", {"count": 1, "text": "é"}), ("now-2", {})]
    assert told["role"] == "user"
    assert told["content"] == (
        "The function find returned:\n12\n\nThe function now-2 returned:\nnoon\n\n"
        "Now answer my question in plain words, or call another function."
    )
    assert formats.messages(HISTORY, request())[0]["content"] == system_text(request().tools)
    assert formats.messages([ASKED], None) == [ASKED]
    (told,) = formats.messages([TOLD], request(), is_continuation=True)
    assert told["role"] == "user" and told["content"].startswith("The function returned:\n12\n\nNow answer")
    for line in system_text(request().tools).splitlines():
        if line.startswith('{"type"'):
            assert json.loads(line)["type"] == "function"


def test_a_template_that_takes_no_system_has_tools_in_the_users_message() -> None:
    formats = formats_of(language(LOCAL["mistral"]))
    (asked,) = formats.messages([ASKED], request())
    assert asked == {"role": "user", "content": system_text(request().tools) + "\n\n" + ASKED["content"]}


def test_ids_are_short_where_a_template_wants_them_so() -> None:
    _, called, told, told_too = formats_of(language(MISTRAL)).messages(HISTORY, request())
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids == [told["tool_call_id"], told_too["tool_call_id"]] and {len(id) for id in ids} == {9}


def test_a_result_has_the_name_of_its_tool() -> None:
    told = formats_of(language(WITH_TOOLS["hermes"])).messages(HISTORY, request())[2]
    assert told == {"role": "tool", "tool_call_id": "call_1", "content": "12", "name": "find"}


def _with_arguments(arguments: object) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    return [ASKED, {**CALLED, "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (_with_arguments("{"), "messages[1].tool_calls[0].function.arguments"),
        (_with_arguments("[]"), "messages[1].tool_calls[0].function.arguments"),
        (_with_arguments({}), "messages[1].tool_calls[0].function.arguments"),
        (_with_arguments("[" * 100_000), "messages[1].tool_calls[0].function.arguments"),
        (_with_arguments('{"a": ' * 64 + "{}" + "}" * 64), "messages[1].tool_calls[0].function.arguments"),
        ([{**CALLED, "tool_calls": []}], "messages[0].tool_calls"),
        ([{**CALLED, "tool_calls": ["x"]}], "messages[0].tool_calls[0]"),
        ([{**CALLED, "tool_calls": [{**CALLS[0], "id": None}]}], "messages[0].tool_calls[0].id"),
        ([{**CALLED, "tool_calls": [{**CALLS[0], "type": "custom"}]}], "messages[0].tool_calls[0].type"),
        ([{**CALLED, "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{**CALLED, "tool_calls": [{"id": "1", "function": {}}]}], "messages[0].tool_calls[0].function.name"),
        ([{**ASKED, "tool_calls": CALLS}], "messages[0].tool_calls"),
        ([{**ASKED, "tool_call_id": "call_1"}], "messages[0].tool_call_id"),
        ([ASKED, TOLD], "messages[1].tool_call_id"),
        ([ASKED, CALLED, {**TOLD, "tool_call_id": "other"}], "messages[2].tool_call_id"),
        ([ASKED, CALLED, {**TOLD, "content": None}], "messages[2].content"),
    ],
)
def test_a_history_that_makes_no_sense_is_refused_by_its_path(messages: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        formats_of(language(CHAT)).messages(messages, request())
    assert (refused.value.status, refused.value.param) == (400, param)


def test_arguments_may_be_nested_as_deep_as_they_may_be_and_no_deeper() -> None:
    messages = _with_arguments('{"a": ' * 63 + "{}" + "}" * 63)
    assert formats_of(language(CHAT)).messages(messages, request())
    with pytest.raises(RequestError, match="at most 64 deep"):
        formats_of(language(CHAT)).messages(_with_arguments('{"a": ' * 64 + "{}" + "}" * 64), request())


def test_no_arguments_may_be_an_empty_text() -> None:
    called = formats_of(language(WITH_TOOLS["hermes"])).messages(_with_arguments(""), request())[1]
    assert called["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("name", "schema", "keyword"),
    [
        ("hermes", {"anyOf": [{"required": ["a"]}]}, None),
        ("qwen3-coder", {"properties": {"a": {"type": "string"}}}, None),
        ("qwen3-coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern"),
        ("qwen3-coder", {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, None),
        ("qwen3-coder", {"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}]}}}, "format"),
        ("qwen3-coder", {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}}, "anyOf"),
        ("qwen3-coder", {"properties": {"a": {"type": ["string", "number"]}}}, "type"),
        ("qwen3-coder", {"properties": {"a": {"allOf": []}}}, "allOf"),
        ("qwen3-coder", {"properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "x"}}}}, None),
        ("qwen3-coder", {"properties": {"a>": {}}}, "properties"),
        ("qwen3-coder", {"properties": {"a": {}}, "description": "A form.", "required": ["b"]}, "required"),
        ("qwen3-coder", {"properties": {"a": {"$ref": "#/properties/b"}}}, "$ref"),
        ("llama-pythonic", {"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("llama-pythonic", {"properties": {"a": {"type": "string", "pattern": "x"}}}, None),
        ("llama-pythonic", {"properties": {"a-b": {}}}, "properties"),
    ],
)
def test_a_format_says_which_keyword_it_cannot_enforce(name: str, schema: dict[str, Any], keyword: str | None) -> None:
    formats = ModelFormats(tool_format=BY_NAME[name], is_described=False)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}
    assert formats.unenforced(request(tools=[tool])) == [keyword]


def test_markers_that_a_vocabulary_has_as_tokens_are_kept_in_the_text() -> None:
    formats = ModelFormats(tool_format=BY_NAME["hermes"], is_described=False, reasoning=THINKS)
    tokenizer = byte_level()
    assert formats.kept_tokens(tokenizer) == frozenset([tokenizer.added_ids.get("<think>")])


def test_machines_read_calls_only_of_tools_that_may_be_called() -> None:
    formats = ModelFormats(tool_format=BY_NAME["hermes"], is_described=True)
    text = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    for asked, has_calls in ((request(), True), (request("none"), False), (None, False)):
        machine = formats.machine(asked, lambda: "call_1")
        machine.feed(text)
        assert machine.has_calls == has_calls
    assert Tool(name="f").schema()["additionalProperties"] is False


def test_where_a_template_takes_one_call_at_a_time_a_grammar_allows_one() -> None:
    single = formats_of(language(WITH_TOOLS["llama3-json"]))
    several = formats_of(language(WITH_TOOLS["mistral"]))
    assert not single.is_parallel and several.is_parallel
    tokenizer = byte_level()
    assert single.grammar(request(), tokenizer) == single.grammar(request(parallel=False), tokenizer)
    assert several.grammar(request(), tokenizer) != several.grammar(request(parallel=False), tokenizer)


def test_a_session_keeps_the_tools_that_its_first_message_lists() -> None:
    spoken, formats = language(CHAT), formats_of(language(CHAT))
    listed = [{"type": "function", "function": {"name": "find", "description": "Finds <|im_end|>."}}]
    asked = request(tools=listed)
    messages = spoken.escape(formats.messages([ASKED], asked))
    formats.session_messages([], asked, spoken, Transcript())
    transcript = Transcript().add(spoken, length=9, messages=messages, output=[5])
    formats.session_messages([], asked, spoken, transcript)
    formats.session_messages([], None, spoken, transcript)
    with pytest.raises(RequestError, match="tools: must be those of the session"):
        formats.session_messages([], request(), spoken, transcript)
