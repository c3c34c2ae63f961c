"""Tracing: OpenTelemetry spans of every request to the engine, below the trace that its caller has begun.

A span `request` with the children `queue`, `prefill` and `decode`, made of the request's events as they come; it ends
with the last one, also when its reader has left. Numbers and names only, never a prompt or a text. Loaded by
`cli.serve` for --otlp-endpoint alone, since its packages are an extra; `serve` puts it in place.
"""

import time
from threading import Thread

from opentelemetry import context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes, AttributeValue
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

import roost
from roost.front.engine_client import Observer
from roost.messages import Begun, Event, Finished, Refused, SpecStats, Submit, Tokens

_PATH = "/v1/traces"  # where collectors take traces
_CLOSE_S = 5  # the last spans get this long to leave
_SHOWN_LEN = 8  # characters of a session's id
_GOOD = ("stop", "length")  # reasons that are no failure
_PROPAGATOR = TraceContextTextMapPropagator()

# OpenTelemetry's names, of its semantic conventions for generative AI
_INPUT, _OUTPUT = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
_CACHED = "gen_ai.usage.cache_read.input_tokens"


class Tracing:
    """Makes the spans of a server's requests and hands them to a processor."""

    def __init__(self, processor: SpanProcessor) -> None:
        own = Resource({SERVICE_NAME: "roost", SERVICE_VERSION: roost.__version__})
        resource = own.merge(OTELResourceDetector().detect())  # the SDK's own variables win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("roost", roost.__version__)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """An application in which the spans of a request continue the trace that its headers name."""

        async def continued(scope: Scope, receive: Receive, send: Send) -> None:
            named = dict(Headers(scope=scope)) if scope["type"] in ("http", "websocket") else {}
            token = context.attach(_PROPAGATOR.extract(named, context.Context()))
            try:
                await app(scope, receive, send)
            finally:
                context.detach(token)

        return continued

    def follow(self, model_name: str, submit: Submit, observer: Observer | None) -> Observer:
        """An observer that makes the spans of a request, and tells another one what happens."""
        return _RequestSpans(self._tracer, model_name, submit, observer)

    def close(self) -> None:
        """Send the last spans; a collector that does not answer is not waited for."""
        last = Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_CLOSE_S)


def tracing_to(endpoint: str) -> Tracing:
    """Spans that go to a collector in batches, on a thread of their own."""
    url = endpoint.rstrip("/")
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url if url.endswith(_PATH) else url + _PATH)))


class _RequestSpans:
    """The spans of one request: itself and the phase that it is in."""

    def __init__(self, tracer: Tracer, model_name: str, submit: Submit, observer: Observer | None) -> None:
        self._tracer = tracer
        self._model_name = model_name
        self._submit = submit
        self._observer = observer
        self._request: Span = INVALID_SPAN
        self._phase: Span = INVALID_SPAN
        self._began_ns = 0
        self._is_decoding = False

    def on_sent(self) -> None:
        """It is on its way: its last event will come."""
        self._began_ns = time.time_ns()
        asked = _asked(self._model_name, self._submit)
        self._request = self._tracer.start_span(
            "request", kind=SpanKind.SERVER, attributes=asked, start_time=self._began_ns
        )
        self._phase = self._begin("queue", self._began_ns, {"roost.new_input_tokens": len(self._submit.tokens)})
        if self._observer is not None:
            self._observer.on_sent()

    def on_event(self, event: Event) -> None:
        """The next event: perhaps another phase, perhaps the end."""
        now = time.time_ns()
        match event:
            case Begun():
                self._next("prefill", now, {_INPUT: event.prompt_tokens, _CACHED: event.cached_tokens})
            case Tokens() if not self._is_decoding:
                self._is_decoding = True
                self._request.set_attribute("gen_ai.response.time_to_first_chunk", (now - self._began_ns) / 1e9)
                self._next("decode", now)
            case Finished():
                self._finish(event, now)
            case Refused():
                self._end(f"{event.status}", now)
        if self._observer is not None:
            self._observer.on_event(event)

    def _begin(self, name: str, now: int, attributes: Attributes) -> Span:
        parent = set_span_in_context(self._request)
        return self._tracer.start_span(name, parent, attributes=attributes, start_time=now)

    def _next(self, name: str, now: int, attributes: Attributes = None) -> None:
        self._phase.end(now)
        self._phase = self._begin(name, now, attributes)

    def _finish(self, event: Finished, now: int) -> None:
        usage = event.usage
        if self._is_decoding:
            self._phase.set_attributes({_OUTPUT: usage.completion_tokens, **_drafting(event.spec)})
        self._request.set_attributes(
            {
                _INPUT: usage.prompt_tokens,
                _CACHED: usage.cached_tokens,
                _OUTPUT: usage.completion_tokens,
                "gen_ai.response.finish_reasons": (event.reason,),
                **_drafting(event.spec),
            }
        )
        self._end("" if event.reason in _GOOD else event.reason, now)

    def _end(self, error: str, now: int) -> None:
        """End both spans; a failure is named by its kind alone, since its message may repeat what a client sent."""
        for span in (self._phase, self._request):
            if error:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(now)


def _asked(model_name: str, submit: Submit) -> dict[str, AttributeValue]:
    """What is known of a request from the beginning."""
    optional: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": submit.max_new_tokens,
        "gen_ai.conversation.id": None if submit.session_id is None else _shown(submit.session_id),
        "roost.client": submit.client or None,
    }
    return {
        "gen_ai.provider.name": "roost",
        "gen_ai.operation.name": "text_completion",  # of tokens, whatever the interface calls it
        "gen_ai.request.model": model_name,
        "gen_ai.request.temperature": submit.sampling.temperature,
        "roost.request_id": submit.request_id,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _drafting(spec: SpecStats) -> dict[str, AttributeValue]:
    """How speculation went, if there was any."""
    if not spec.rounds:
        return {}
    return {
        "roost.spec.rounds": spec.rounds,
        "roost.spec.accept_length": spec.accept_length,
        "roost.spec.drafts_offered": spec.drafts_offered,
        "roost.spec.drafts_accepted": spec.drafts_accepted,
    }


def _shown(session_id: str) -> str:
    """A session's id, shortened: with a whole one, whoever reads traces could go on in the session."""
    return session_id if len(session_id) <= _SHOWN_LEN else session_id[:_SHOWN_LEN] + "…"
