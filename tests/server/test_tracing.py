"""Traces arrive at a collector: the spans of real requests, in their callers' traces, also the last ones."""

import gzip
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from roost.cli.main import main
from tests.server.conftest import StartTiny
from tests.support.server_process import Stream

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
WITHOUT = "import sys; sys.modules[{package!r}] = None; from roost.cli.main import main; sys.exit(main({flags}))"


class Collector(HTTPServer):
    """A collector of traces that keeps what it is sent."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Span]:
        """All spans that have arrived."""
        resources = [resource for each in self.received for resource in each.resource_spans]
        return [span for each in resources for scope in each.scope_spans for span in scope.spans]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        assert self.path == "/v1/traces"
        self.server.received.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector that listens."""
    with Collector() as started:
        thread = Thread(target=started.serve_forever)
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def test_requests_of_every_kind_are_traced_to_their_end(start_tiny: StartTiny, collector: Collector) -> None:
    server = start_tiny("--otlp-endpoint", collector.url)
    options = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3, 4, 5], "sampling_params": options}
    assert server.post("/generate", body, headers=CALLER).status_code == 200
    stream = Stream(server, "/v1/completions", {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True})
    assert stream.next()
    stream.close()
    assert server.stop() == 0
    spans = collector.spans()
    whole = {span.trace_id.hex() == TRACE: span for span in spans if span.name == "request"}
    asked, left = whole[True], whole[False]
    names = Counter(span.name for span in spans)
    assert names == dict.fromkeys(("request", "queue", "prefill", "decode"), 2)
    assert asked.parent_span_id.hex() == "b7ad6b7169203331" and not left.parent_span_id
    values = {each.key: each.value for each in asked.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == 5
    assert values["gen_ai.usage.output_tokens"].int_value == 4
    assert (asked.status.code, left.status.message) == (0, "abort")
    assert "rror" not in server.log


def test_a_collector_that_is_not_there_stops_no_request_and_no_server(start_tiny: StartTiny) -> None:
    server = start_tiny("--otlp-endpoint", "http://127.0.0.1:9")
    assert server.generate({"text": "a", "sampling_params": {"max_new_tokens": 2}})
    assert server.stop() == 0


@pytest.mark.parametrize("package", ["opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"])
def test_without_its_packages_the_flag_is_refused_with_what_to_install(package: str) -> None:
    flags = ["serve", "--otlp-endpoint", "http://localhost:4318"]
    command = [sys.executable, "-c", WITHOUT.format(package=package, flags=flags)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    (said,) = ran.stderr.splitlines()
    assert said.startswith("roost serve: error: --otlp-endpoint: the package opentelemetry")
    assert "is missing: pip install '" in said and ("opentelemetry-sdk" in said or "[otel]" in said)


@pytest.mark.parametrize("url", ["", "localhost:4318", "ftp://a", "http://", "http://me:secret@a", "http://a/b?c=d"])
def test_a_place_that_is_no_collectors_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--otlp-endpoint", url]) == 2
    said = capsys.readouterr().err
    assert "--otlp-endpoint must be http://" in said and "secret" not in said


def test_without_the_flag_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, roost.cli.serve, roost.server.serve, roost.server.worker; sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
