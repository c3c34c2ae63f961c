"""Tracing: every request ends its spans, with its tokens and without its text, in the trace of whoever asked."""

import asyncio
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Receive, Scope, Send

from roost.messages import Abort, Begun, Event, Finished, OpenSession, Refused, SpecStats, Submit, Tokens, Usage
from roost.server import tracing as module
from roost.server.tracing import Tracing, tracing_to
from tests.support.engine_client import EngineClientDouble, Recorder, engine_client, resolved
from tests.support.silent_engine import SilentEngine

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = (7, 8, 9, 10, 11, 12)


class Traces:
    """A tracing whose spans the test reads."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(SimpleSpanProcessor(self._exporter))

    def spans(self) -> dict[str, ReadableSpan]:
        """The spans that have ended, by name."""
        ended = self._exporter.get_finished_spans()
        assert len({span.name for span in ended}) == len(ended)
        return {span.name: span for span in ended}

    def send(self, client: EngineClientDouble, submit: Submit) -> None:
        """Submit a request to an engine, followed."""
        follower = self.tracing.follow("tiny", submit, None)
        follower.on_sent()
        client.engine.post(submit, follower.on_event)

    def tell(self, submit: Submit, *events: Event) -> None:
        """Say that a request was sent, and what came of it."""
        follower = self.tracing.follow("tiny", submit, None)
        follower.on_sent()
        for event in events:
            follower.on_event(event)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """What a span says."""
    return dict(span.attributes or {})


def finished(reason: str = "stop", message: str = "") -> Finished:
    """An end, of two rounds with four drafts."""
    return Finished(
        request_id="r",
        reason=reason,
        usage=Usage(prompt_tokens=6, cached_tokens=4, completion_tokens=3),
        max_new_tokens=9,
        spec=SpecStats(rounds=2, drafts_offered=4, drafts_accepted=1, histogram=(1, 1)),
        message=message,
    )


BEGUN = Begun(request_id="r", prompt_tokens=6, cached_tokens=4)
SUBMIT = Submit(request_id="r", tokens=PROMPT)


def test_a_request_of_an_engine_has_a_span_for_each_phase_with_its_tokens() -> None:
    traces, client = Traces(), engine_client()
    traces.send(client, Submit(request_id="r", tokens=PROMPT, max_new_tokens=5))
    client.run()
    spans = traces.spans()
    assert set(spans) == {"request", "queue", "prefill", "decode"}
    assert attributes(spans["queue"]) == {"roost.new_input_tokens": 6}
    assert attributes(spans["prefill"]) == {"gen_ai.usage.input_tokens": 6, "gen_ai.usage.cache_read.input_tokens": 0}
    assert attributes(spans["decode"]) == {"gen_ai.usage.output_tokens": 5}
    said = attributes(spans["request"])
    assert said.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert said == {
        "gen_ai.provider.name": "roost",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "roost.request_id": "r",
    }
    assert all(span.status.is_unset for span in spans.values())


def test_the_phases_are_the_requests_children_and_leave_no_gap() -> None:
    traces = Traces()
    traces.tell(SUBMIT, BEGUN, Tokens(request_id="r", tokens=(1,)), Tokens(request_id="r", tokens=(2, 3)), finished())
    spans = traces.spans()
    whole, queue, prefill, decode = (spans[name] for name in ("request", "queue", "prefill", "decode"))
    assert {span.parent.span_id for span in (queue, prefill, decode) if span.parent} == {whole.context.span_id}
    assert whole.parent is None
    times = [queue.start_time, queue.end_time, prefill.end_time, decode.end_time]
    assert times == [whole.start_time, prefill.start_time, decode.start_time, whole.end_time]


def test_speculation_is_told_where_there_was_some() -> None:
    traces = Traces()
    traces.tell(SUBMIT, BEGUN, Tokens(request_id="r", tokens=(1, 2, 3)), finished())
    told = {
        "roost.spec.rounds": 2,
        "roost.spec.accept_length": 1.5,
        "roost.spec.drafts_offered": 4,
        "roost.spec.drafts_accepted": 1,
    }
    for name in ("request", "decode"):
        assert told.items() <= attributes(traces.spans()[name]).items()


def test_a_request_without_output_has_no_decode() -> None:
    traces, client = Traces(), engine_client()
    client.send(OpenSession(session_id="walk"))
    traces.send(client, Submit(request_id="r", tokens=PROMPT, max_new_tokens=0, session_id="walk"))
    client.run()
    assert set(traces.spans()) == {"request", "queue", "prefill"}


@pytest.mark.parametrize(("session_id", "shown"), [("12345678", "12345678"), ("123456789", "12345678…")])
def test_a_sessions_id_is_shortened(session_id: str, shown: str) -> None:
    traces = Traces()
    traces.tell(Submit(request_id="r", tokens=(), session_id=session_id), BEGUN, finished())
    assert attributes(traces.spans()["request"])["gen_ai.conversation.id"] == shown


def test_a_request_aborted_in_the_queue_ends_there() -> None:
    traces, client = Traces(), engine_client(max_running=1)
    client.send(Submit(request_id="first", tokens=PROMPT, max_new_tokens=5))
    traces.send(client, SUBMIT)
    client.send(Abort(request_id="r"))
    client.run()
    spans = traces.spans()
    assert set(spans) == {"request", "queue"}
    assert {span.status.description for span in spans.values()} == {"abort"}
    assert not any(span.status.is_ok or span.status.is_unset for span in spans.values())
    assert attributes(spans["request"])["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_request_whose_step_fails_ends_with_an_error() -> None:
    options = resolved()
    traces, client = Traces(), engine_client(Recorder(options, broken=frozenset(range(50))))
    traces.send(client, Submit(request_id="r", tokens=PROMPT, max_new_tokens=5))
    client.run()
    request = traces.spans()["request"]
    assert (request.status.description, attributes(request)["error.type"]) == ("error", "error")


def test_a_refused_request_says_with_which_status() -> None:
    traces, client = Traces(), engine_client()
    traces.send(client, Submit(request_id="r", tokens=PROMPT, session_id="nobody's"))
    client.run()
    spans = traces.spans()
    assert set(spans) == {"request", "queue"}
    assert attributes(spans["request"])["error.type"] == "404" and not spans["request"].status.is_ok


@pytest.mark.parametrize(
    "last",
    [finished("error", message="secret"), Refused(request_id="r", status=400, message="secret", param="secret")],
)
def test_nothing_that_a_client_said_is_in_a_span(last: Event) -> None:
    traces = Traces()
    submit = Submit(request_id="r", tokens=(4242, 4343), stop=("secret",), grammar="secret", cache_salt="secret")
    traces.tell(submit, BEGUN, Tokens(request_id="r", tokens=(4444,)), last)
    for span in traces.spans().values():
        written = span.to_json()
        assert not [
            word for word in ("secret", "4242", "4343", "4444") if f'"{word}' in written or f" {word}" in written
        ]


async def _ask(tracing: Tracing, headers: list[tuple[bytes, bytes]]) -> None:
    """An HTTP request with some headers, that asks the engine in a task of its own."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def task() -> None:
            follower = tracing.follow("tiny", SUBMIT, None)
            follower.on_sent()
            follower.on_event(finished())

        await asyncio.create_task(task())

    async def nothing(message: Any = None) -> Any:
        raise AssertionError("no bytes pass")

    await tracing.wrap(app)({"type": "http", "headers": headers}, nothing, nothing)


def test_the_trace_of_the_caller_goes_on() -> None:
    traces = Traces()
    asyncio.run(_ask(traces.tracing, [(b"traceparent", CALLER.encode()), (b"tracestate", b"vendor=1")]))
    request = traces.spans()["request"]
    assert request.parent is not None
    _, trace_id, span_id, _ = CALLER.split("-")
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (trace_id, span_id)
    assert request.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("headers", [[], [(b"traceparent", b"nonsense")]])
def test_without_a_trace_of_the_caller_one_begins(headers: list[tuple[bytes, bytes]]) -> None:
    traces = Traces()
    asyncio.run(_ask(traces.tracing, headers))
    assert traces.spans()["request"].parent is None


def test_a_trace_that_its_caller_does_not_record_is_not_recorded() -> None:
    traces = Traces()
    asyncio.run(_ask(traces.tracing, [(b"traceparent", CALLER.encode()[:-1] + b"0")]))
    assert traces.spans() == {}


class _Seen:
    """An observer that counts."""

    def __init__(self) -> None:
        self.events: list[Event | None] = []

    def on_sent(self) -> None:
        """Sent."""
        self.events.append(None)

    def on_event(self, event: Event) -> None:
        """An event."""
        self.events.append(event)


def test_spans_end_after_their_reader_has_left_and_other_observers_see_all() -> None:
    traces, seen = Traces(), _Seen()

    async def scene() -> None:
        engine = SilentEngine()
        engine.follow = partial(traces.tracing.follow, "tiny")
        async with aclosing(engine.stream_events(SUBMIT, "name", seen)) as events:
            reading = asyncio.create_task(anext(events))
            await asyncio.sleep(0)
            engine.answer(Submit, BEGUN)
            assert await reading == BEGUN
        assert "request" not in traces.spans()
        engine.answer(Submit, finished("abort"))

    asyncio.run(scene())
    assert seen.events == [None, BEGUN, finished("abort")]
    assert traces.spans()["request"].status.description == "abort"


@pytest.mark.parametrize("given", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_a_collector_is_named_with_or_without_its_path(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def exporter(endpoint: str) -> InMemorySpanExporter:
        named.append(endpoint)
        return InMemorySpanExporter()

    monkeypatch.setattr(module, "OTLPSpanExporter", exporter)
    tracing_to(given).close()
    assert named == ["http://c:4318/v1/traces"]


def test_the_sdks_own_variables_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [Traces().tracing]
    monkeypatch.setenv("OTEL_SERVICE_NAME", "roost-eu")
    names.append(Traces().tracing)
    assert [each._provider.resource.attributes["service.name"] for each in names] == ["roost", "roost-eu"]
