"""An answer is a stream of events that Anthropic's client reads, and adds up to the whole message."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from roost.server.body_reader import parse, record_of
from roost.server.message_events import SIGNATURE, MessageStream, error_body
from roost.server.message_input import input_messages
from roost.server.message_schema import InputMessage
from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent
from roost.tools.openai_form import message_of

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BETA_EVENT: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def call(draw: st.DrawFn) -> list[ToolEvent]:
    """A call whose number is not known yet."""
    arguments = draw(st.dictionaries(TEXTS, VALUES, max_size=3))
    written = json.dumps(arguments, ensure_ascii=draw(st.booleans()))
    is_complete = draw(st.booleans())
    written = written if is_complete else written[: draw(st.integers(0, len(written) - 1))]
    cuts = sorted(draw(st.lists(st.integers(0, len(written)), max_size=4)))
    pieces = [written[start:end] for start, end in itertools.pairwise([0, *cuts, len(written)])]
    name = draw(st.sampled_from(["find", "now"]))
    return [
        CallOpened(index=0, id="call_x", name=name),
        *(CallArguments(index=0, text=piece) for piece in pieces),
        CallClosed(index=0, is_complete=is_complete),
    ]


PART = st.one_of(TEXTS.map(lambda text: [Content(text=text)]), TEXTS.map(lambda text: [Reasoning(text=text)]), call())


def stream_of(**options: Any) -> MessageStream:
    ids = itertools.count()
    return MessageStream(id="msg_1", model="tiny", new_id=lambda prefix: f"{prefix}_{next(ids)}", **options)


def ended(stream: MessageStream, events: list[ToolEvent], **how: Any) -> list[dict[str, Any]]:
    """All events of an answer."""
    how = {"reason": "stop", "matched_stop": None, "has_calls": False, "completion_tokens": 7, **how}
    return [*stream.begin(10, 4), *(made for each in events for made in stream.feed([each])), *stream.end(**how)]


def accumulated(events: list[dict[str, Any]]) -> Message:
    """What the client makes of a stream."""
    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return Message.model_validate(snapshot.to_dict())


def incomplete_blocks(events: list[ToolEvent], content: list[dict[str, Any]]) -> Iterator[int]:
    """Places of calls that broke off."""
    closed = [event.is_complete for event in events if isinstance(event, CallClosed)]
    places = [place for place, block in enumerate(content) if block["type"] == "tool_use"]
    return (place for place, is_complete in zip(places, closed, strict=True) if not is_complete)


@given(st.lists(PART, max_size=6), st.sampled_from(["stop", "length"]), st.none() | st.just("END"), st.booleans())
def test_the_client_reads_every_event_and_makes_the_same_message_of_them(
    parts: list[list[ToolEvent]], reason: str, matched_stop: str | None, has_calls: bool
) -> None:
    answer = [event for part in parts for event in part]
    stream = stream_of()
    events = ended(stream, answer, reason=reason, matched_stop=matched_stop, has_calls=has_calls)
    for event in events:
        assert BETA_EVENT.validate_json(msgspec.json.encode(event)).type == event["type"]
    message = msgspec.json.decode(msgspec.json.encode(stream.message))
    BetaMessage.model_validate(message)
    read = accumulated(events).to_dict()
    for place in incomplete_blocks(answer, message["content"]):  # the client shows what there was of its arguments
        assert message["content"][place]["input"] == {}
        read["content"][place]["input"] = {}
    assert read == Message.model_validate(message).to_dict()


@given(st.lists(PART, max_size=6))
def test_blocks_are_opened_and_stopped_one_after_another(parts: list[list[ToolEvent]]) -> None:
    kinds = [(event["type"], event.get("index")) for event in ended(stream_of(), list(itertools.chain(*parts)))]
    assert kinds[0][0] == "message_start" and [kind for kind, _ in kinds[-2:]] == ["message_delta", "message_stop"]
    opened, is_open = -1, False
    for kind, index in kinds[1:-2]:
        if kind == "content_block_start":
            opened += 1
        assert index == opened and is_open == (kind != "content_block_start")
        is_open = kind != "content_block_stop"
    assert not is_open


def numbered(part: list[ToolEvent], calls: Iterator[int]) -> list[ToolEvent]:
    """A part with the number of its call, if it is one."""
    if not any(isinstance(event, CallOpened) for event in part):
        return part
    index = next(calls)
    return [event if isinstance(event, Content | Reasoning) else replace(event, index=index) for event in part]


@given(st.lists(PART, max_size=6))
def test_an_answer_that_comes_back_reads_as_it_was_given(parts: list[list[ToolEvent]]) -> None:
    calls = itertools.count()
    answer = [event for part in parts for event in numbered(part, calls)]
    stream = stream_of()
    ended(stream, answer)
    sent_back = record_of(
        parse(json.dumps({"role": "assistant", "content": stream.message["content"]}).encode()), InputMessage
    )
    (message,) = input_messages([sent_back], may_end_with_answer=True)
    given_first = message_of(answer)
    read_calls, given_calls = message.pop("tool_calls", []), given_first.pop("tool_calls", [])
    del given_first["refusal"]
    assert message == {**given_first, "content": given_first["content"] or ""}
    closed = [event.is_complete for event in answer if isinstance(event, CallClosed)]
    for one, other, is_complete in zip(read_calls, given_calls, closed, strict=True):
        assert one["function"]["name"] == other["function"]["name"]
        if is_complete:
            assert json.loads(one["function"]["arguments"]) == json.loads(other["function"]["arguments"])


def test_thoughts_text_and_a_call_are_blocks_in_their_order() -> None:
    answer: list[ToolEvent] = [
        Reasoning(text="Hm, "),
        Reasoning(text="so."),
        Content(text="I look."),
        CallOpened(index=0, id="call_x", name="find"),
        CallArguments(index=0, text='{"a"'),
        CallArguments(index=0, text=": 1}"),
        CallClosed(index=0, is_complete=True),
    ]
    stream = stream_of()
    ended(stream, answer, has_calls=True)
    assert stream.message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hm, so.", "signature": SIGNATURE},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_0", "name": "find", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
            "service_tier": "standard",
        },
    }


def test_thoughts_that_the_client_does_not_want_are_a_signature_alone() -> None:
    stream = stream_of(shows_thinking=False)
    events = ended(stream, [Reasoning(text="Hm"), Content(text="Hi")])
    assert "Hm" not in json.dumps(events)
    assert accumulated(events).content[0].to_dict() == {"type": "thinking", "thinking": "", "signature": SIGNATURE}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"reason": "stop"}, ("end_turn", None)),
        ({"reason": "length"}, ("max_tokens", None)),
        ({"reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"reason": "stop", "has_calls": True}, ("tool_use", None)),
        ({"reason": "stop", "matched_stop": "END", "has_calls": True}, ("tool_use", None)),
        ({"reason": "length", "has_calls": True}, ("max_tokens", None)),
    ],
)
def test_an_answer_says_why_it_ended(how: dict[str, Any], said: tuple[str, str | None]) -> None:
    stream = stream_of()
    ended(stream, [Content(text="Hi")], **how)
    assert (stream.message["stop_reason"], stream.message["stop_sequence"]) == said


def test_an_answer_without_words_has_no_blocks() -> None:
    stream = stream_of()
    assert [event["type"] for event in ended(stream, [Content(text="")])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert stream.message["content"] == []


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"a": 9223372036854775807}', {"a": 2**63 - 1}),
        ('{"a": 9223372036854775808}', {"a": 2.0**63}),
        ('{"a": "\\ud83d"}', {"a": "?"}),
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", {}),
        ("", {}),
    ],
)
def test_whatever_a_model_writes_as_arguments_can_be_sent(written: str, read: dict[str, Any]) -> None:
    stream = stream_of()
    ended(
        stream,
        [
            CallOpened(index=0, id="call_x", name="find"),
            CallArguments(index=0, text=written),
            CallClosed(index=0, is_complete=True),
        ],
    )
    assert stream.message["content"][0]["input"] == read
    msgspec.json.encode(stream.message)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (501, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
def test_an_error_has_the_type_that_its_status_has_there(status: int, kind: str) -> None:
    error = {"type": kind, "message": "top_p: no"}
    assert error_body(status, "top_p: no") == {"type": "error", "error": error, "request_id": None}
