"""Events of a response: in order, complete, and such as OpenAI's own client reads, whatever the model says."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from roost.server.response_events import ResponseStream, usage_of
from roost.server.response_input import called_as, input_messages, read_response_tools
from roost.server.response_schema import ResponseBody, response_echo
from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent
from roost.tools.openai_form import message_of

TOOLS = [
    {"type": "function", "name": "look_up", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "files", "description": "", "tools": [{"type": "function", "name": "read"}]},
    {"type": "web_search"},
]
PARSED = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
# what https://www.openresponses.org requires of a response
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
OF_ITEM = {"function_call": "arguments", "custom_tool_call": "input"}
Event = dict[str, Any]


def new_stream(*, with_logprobs: bool = False) -> ResponseStream:
    """A response whose ids are counted."""
    number = count()
    _, tools = read_response_tools(TOOLS)
    return ResponseStream(
        id="resp_1",
        created_at=1000,
        model="m",
        echo=response_echo(ResponseBody(tools=TOOLS), tools),
        new_id=lambda prefix: f"{prefix}_{next(number)}",
        called_as=called_as(tools),
        with_logprobs=with_logprobs,
        now=lambda: 1234.5,
    )


def token(text: str) -> dict[str, Any]:
    """A token with its log-probability."""
    return {"token": text, "logprob": -1.0, "bytes": list(text.encode()), "top_logprobs": []}


def parsed(event: Event) -> Any:
    """The event as the client reads it; raises if something is not there or not of its type."""
    return PARSED[event["type"]].model_validate(json.loads(json.dumps(event)))


def kinds(events: Sequence[Event]) -> list[str]:
    """Types of events, without what they have in common."""
    return [event["type"].removeprefix("response.") for event in events]


@st.composite
def outputs(draw: st.DrawFn) -> list[ToolEvent]:
    """What a model may say."""
    events: list[ToolEvent] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(("content", "reasoning", "call")), max_size=6)):
        if kind == "call":
            name = draw(st.sampled_from(("look_up", "patch", "files__read", "unknown")))
            is_complete = draw(st.booleans())
            text = json.dumps({"input": draw(st.text(max_size=5))})[: None if is_complete else 7]
            cut = draw(st.integers(0, len(text)))
            events.append(CallOpened(index=num_calls, id=f"call_{num_calls}", name=name))
            events += [CallArguments(index=num_calls, text=piece) for piece in (text[:cut], text[cut:])]
            events.append(CallClosed(index=num_calls, is_complete=is_complete))
            num_calls += 1
        else:
            texts = draw(st.lists(st.text(max_size=4), min_size=1, max_size=3))
            events += [Content(text=each) if kind == "content" else Reasoning(text=each) for each in texts]
    return events


def run(stream: ResponseStream, output: list[ToolEvent], sizes: Sequence[int], status: str) -> list[Event]:
    """All events of an output that comes in pieces of these sizes."""
    events, at = stream.begin(), 0
    for size in [*sizes, len(output)]:
        events += stream.feed(output[at : at + size], [token("t")])
        at += size
    reason = "max_output_tokens" if status == "incomplete" else None
    error = {"code": "server_error", "message": "it failed"} if status == "failed" else None
    return events + stream.end(status=status, incomplete_reason=reason, error=error, usage=usage_of(7, 3, 5, 2))


@given(
    output=outputs(),
    sizes=st.lists(st.integers(0, 4), max_size=8),
    status=st.sampled_from(("completed", "incomplete", "failed", "cancelled")),
    with_logprobs=st.booleans(),
)
def test_any_output_becomes_events_that_the_client_reads(
    output: list[ToolEvent], sizes: list[int], status: str, with_logprobs: bool
) -> None:
    stream = new_stream(with_logprobs=with_logprobs)
    events = run(stream, output, sizes, status)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert kinds(events)[:2] == ["created", "in_progress"]
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in events:
        state.handle_event(parsed(event))
    response = events[-1]["response"]
    assert response == stream.response and response["status"] == status
    assert {event["response"]["id"] for event in events if "response" in event} == {"resp_1"}
    assert set(Response.model_fields) | REQUIRED <= set(response)
    check_items(events, response["output"])
    if status == "completed":
        assert state._completed_response is not None
        said = "".join(event.text for event in output if isinstance(event, Content))
        assert state._completed_response.output_text == said
        assert state._completed_response.completed_at == 1234


def check_items(events: list[Event], items: list[dict[str, Any]]) -> None:
    """Each item is opened and done once, in its place, and its pieces are the whole of it."""
    added = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == list(range(len(items)))
    assert len({item["id"] for item in items}) == len(items)
    for index, item in enumerate(items):
        own = [event for event in events if event.get("output_index") == index]
        assert own == events[events.index(own[0]) : events.index(own[-1]) + 1]  # nothing of another in between
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]} == {own[0]["item"]["id"]}
        assert own[0]["item"]["status"] == "in_progress" and own[-1]["item"] == item
        deltas = [event for event in own if "delta" in event]
        text = "".join(event["delta"] for event in deltas)
        if item["type"] in OF_ITEM:
            field = OF_ITEM[item["type"]]
            assert kinds(own)[-2].endswith(".done") and own[-2][field] == item[field] == text
            assert own[0]["item"][field] == ""
            continue
        (part,) = item["content"]
        name = "output_text" if item["type"] == "message" else "reasoning_text"
        body = [f"{name}.delta"] * len(deltas)
        assert kinds(own) == [
            *("output_item.added", "content_part.added"),
            *(*body, f"{name}.done", "content_part.done", "output_item.done"),
        ]
        assert own[0]["item"]["content"] == [] and own[1]["part"]["text"] == ""
        assert own[-3]["text"] == text == part["text"] and own[-2]["part"] == part
        if name == "output_text":
            logprobs = [each for event in deltas for each in event["logprobs"]]
            assert own[-3]["logprobs"] == logprobs == part["logprobs"]


def test_an_answer_comes_back_as_the_message_that_it_was() -> None:
    stream = new_stream()
    output: list[ToolEvent] = [Reasoning(text="so"), Content(text="Let me see."), *call(0, "files__read", '{"a": 1}')]
    output += [*call(1, "patch", '{"input": "x"}'), Content(text=" Now.")]
    run(stream, output, [1, 1, 1], "completed")
    expected = message_of(output)
    del expected["refusal"]
    assert input_messages(stream.response["output"]) == [expected]


def call(index: int, name: str, arguments: str) -> list[ToolEvent]:
    """A call that is complete."""
    return [
        CallOpened(index=index, id=f"call_{index}", name=name),
        CallArguments(index=index, text=arguments),
        CallClosed(index=index, is_complete=True),
    ]


def test_calls_are_shown_as_the_client_knows_its_tools() -> None:
    stream = new_stream()
    texts = ("{}", '{"input": "a\\n"}', '{"path": "b"}')
    output = [
        event
        for index, (name, text) in enumerate(zip(("look_up", "patch", "files__read"), texts, strict=True))
        for event in call(index, name, text)
    ]
    run(stream, output, [], "completed")
    shown = [{name: item[name] for name in item if name != "id"} for item in stream.response["output"]]
    base = {"status": "completed"}
    assert shown == [
        {**base, "type": "function_call", "call_id": "call_0", "name": "look_up", "arguments": "{}"},
        {**base, "type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "a\n"},
        {
            **base,
            "type": "function_call",
            "call_id": "call_2",
            "name": "read",
            "namespace": "files",
            "arguments": texts[2],
        },
    ]
    assert [tool["type"] for tool in stream.response["tools"]] == ["function", "custom", "namespace"]


@pytest.mark.parametrize(
    ("status", "last", "of_item"),
    [
        ("completed", "completed", "completed"),
        ("incomplete", "incomplete", "incomplete"),
        ("failed", "failed", "incomplete"),
        ("cancelled", "incomplete", "incomplete"),
    ],
)
def test_what_is_open_at_the_end_is_as_complete_as_the_response(status: str, last: str, of_item: str) -> None:
    stream = new_stream()
    events = run(stream, [*call(0, "look_up", "{}"), Content(text="and")], [], status)
    assert kinds(events)[-1] == last
    assert [item["status"] for item in stream.response["output"]] == ["completed", of_item]


def test_a_call_that_was_cut_off_is_incomplete_however_the_response_ends() -> None:
    stream = new_stream()
    run(stream, [CallOpened(index=0, id="call_0", name="look_up"), CallArguments(index=0, text='{"a')], [], "completed")
    assert [item["status"] for item in stream.response["output"]] == ["incomplete"]
    assert input_messages(stream.response["output"]) == []


def test_a_response_in_the_background_is_queued_first() -> None:
    stream = new_stream()
    first = stream.queued()
    assert (kinds(first), stream.response["status"]) == (["created", "queued"], "queued")
    assert {event["response"]["status"] for event in first} == {"queued"}
    assert kinds(stream.begin()) == ["in_progress"] and stream.response["status"] == "in_progress"


def test_logprobs_wait_for_the_text_of_their_tokens_and_others_are_left_out() -> None:
    stream = new_stream(with_logprobs=True)
    stream.begin()
    stream.feed([Reasoning(text="hm")], [token("hm")])
    assert stream.feed([], [token("held")]) == []
    (*_, delta) = stream.feed([Content(text="held back")], [token("back")])
    assert [each["token"] for each in delta["logprobs"]] == ["held", "back"]
    stream.feed(call(0, "look_up", "{}"), [token("call")])
    stream.end(status="completed", usage=None)
    assert [each["token"] for each in stream.response["output"][1]["content"][0]["logprobs"]] == ["held", "back"]


def test_usage_tells_cached_from_written_tokens() -> None:
    assert usage_of(10, 4, 3, 1) == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 6},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 13,
    }
