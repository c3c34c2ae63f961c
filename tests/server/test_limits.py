"""Sockets that wait, drip or are too many: each is given up in time, and nobody else is kept out by them."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest

from roost.server.connections import PROBE_SLOTS
from tests.support.server_process import PATIENCE_S, Server, Stream, wait_until
from tests.support.tiny_folder import ENDLESS

PLACES = 6
GET = b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
SHORT = {"text": "a", "sampling_params": {"max_new_tokens": 1}}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server with little time and few places."""
    limits = {"header-s": 1, "body-s": 1, "keep-alive-s": 1, "stall-s": 1, "max-connections": PLACES}
    flags = [text for name, value in limits.items() for text in (f"--{name}", str(value))]
    model = ("--model", str(tiny_model), "--threads", "1", "--pool-tokens", "16384")
    started = Server(tmp_path_factory.mktemp("hasty"), *model, *flags)
    try:
        yield started
        started.check_rest()
        assert started.stop() == 0
    finally:
        started.kill()


def line_to(server: Server) -> socket.socket:
    """A connection."""
    place = urlparse(server.url)
    return socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)


def rest(line: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    try:
        while part := line.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def drip(line: socket.socket) -> bytes:
    """Send a byte again and again until the server closes; gives what it said."""
    line.settimeout(0.05)
    said = b""
    while True:
        try:
            part = line.recv(65536)
            said += part
            if not part:
                return said
        except TimeoutError:
            try:
                line.sendall(b"a")
            except OSError:
                return said
        except ConnectionResetError:
            return said


@pytest.mark.parametrize("sent", [b"", b"GET", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: "])
def test_a_request_that_does_not_arrive_is_given_up(hasty: Server, sent: bytes) -> None:
    line = line_to(hasty)
    line.sendall(sent)
    said = rest(line)
    assert said.startswith(b"HTTP/1.1 408 ") == bool(sent), said
    assert not sent or b"--header-s" in said


def test_headers_that_drip_are_given_up(hasty: Server) -> None:
    line = line_to(hasty)
    line.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: ")
    assert drip(line).startswith(b"HTTP/1.1 408 ")


def test_headers_that_drip_after_a_good_request_are_given_up(hasty: Server) -> None:
    line = line_to(hasty)
    line.sendall(GET + b"GET /ready HTTP/1.1\r\nx: ")
    answers = drip(line)
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answers


@pytest.mark.parametrize("path", ["/generate", "/nowhere"])
def test_a_body_that_drips_is_given_up_also_after_its_answer(hasty: Server, path: str) -> None:
    line = line_to(hasty)
    line.sendall(POST.replace(b"/generate", path.encode()))
    said = drip(line)
    assert said.startswith(b"HTTP/1.1 408 " if path == "/generate" else b"HTTP/1.1 404 "), said
    assert said.count(b"HTTP/1.1") == 1


def test_a_connection_that_is_not_used_again_is_closed(hasty: Server) -> None:
    line = line_to(hasty)
    line.sendall(GET)
    assert rest(line).startswith(b"HTTP/1.1 200 ")


def num_sockets(server: Server) -> int:
    """Sockets of the server that clients use, the one that listens included."""
    port = f":{urlparse(server.url).port:04X} "
    lines = Path(f"/proc/{server.process.pid}/net/tcp").read_text().splitlines()
    own = {path.readlink().name for path in Path(f"/proc/{server.process.pid}/fd").iterdir()}
    return sum(port in line.split("  ")[1] and f"socket:[{line.split()[9]}]" in own for line in lines[1:])


def test_idle_connections_keep_nobody_out(hasty: Server) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(line_to(hasty)) for _ in range(3 * PLACES + PROBE_SLOTS)]
        sending = [stack.enter_context(line_to(hasty)) for _ in range(3 * PLACES)]
        for line in sending:
            line.sendall(POST)
        for path in ("/health", "/ready", "/server_info"):
            assert httpx.get(hasty.url + path, timeout=PATIENCE_S).status_code == 200
        assert httpx.post(f"{hasty.url}/generate", json=SHORT, timeout=PATIENCE_S).status_code == 200
        assert rest(idle[0]) == b""


def test_when_all_connections_are_at_work_health_still_answers_and_others_are_refused(hasty: Server) -> None:
    body = {"text": "a", "sampling_params": ENDLESS, "stream": True}
    streams = [Stream(hasty, "/generate", body) for _ in range(PLACES)]
    for stream in streams:
        stream.next()
    for path, status in (("/health", 200), ("/ready", 200), ("/generate", 503), ("/metrics", 503), ("/health", 200)):
        line = line_to(hasty)
        line.sendall(GET.replace(b"/ready", path.encode()))
        said = rest(line)
        assert said.startswith(f"HTTP/1.1 {status} ".encode()), said
        assert b"connection: close" in said
    with ExitStack() as stack:  # the slots for probes cannot be filled either
        for _ in range(2 * PROBE_SLOTS):
            stack.enter_context(line_to(hasty))
        assert httpx.get(f"{hasty.url}/health", timeout=PATIENCE_S).status_code == 200
    for stream in streams:
        assert stream.next()["meta_info"]["finish_reason"] is None  # nobody at work was made to leave
        stream.close()
    wait_until(lambda: httpx.post(f"{hasty.url}/generate", json=SHORT).status_code == 200)


def test_with_few_file_descriptors_health_answers_and_the_log_stays_short(tmp_path: Path, tiny_model: Path) -> None:
    server = Server(tmp_path, "--model", str(tiny_model), "--threads", "1", num_files=120)
    try:
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(line_to(server))
            for _ in range(3):
                assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
        wait_until(lambda: num_sockets(server) == 1)
        _exhaust(server)
        assert "Traceback" not in server.log
        assert len(server.log) < 10_000
        assert server.stop() == 0
    finally:
        server.kill()


def _exhaust(server: Server) -> None:
    """Take away even what it had kept for itself: it says so, and goes on when it has some again."""
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    num_files = len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_files, before[1]))
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(line_to(server))
        wait_until(lambda: "Too many open files" in server.log)
        cpu_s = server.cpu_s()
        wait_until(lambda: server.log.count("Too many open files") >= 3)  # about once a second
        assert server.cpu_s() - cpu_s < 1
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200


def test_what_cannot_be_opened_is_not_promised(tmp_path: Path) -> None:
    server = Server(tmp_path, "--max-connections", "500", wait=False, num_files=300)
    assert server.process.wait(PATIENCE_S) == 2
    (said,) = server.log.splitlines()
    assert said.startswith("roost serve: error: --max-connections 500 needs ")
    server.kill()
