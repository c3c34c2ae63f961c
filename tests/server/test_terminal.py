"""What a person at a terminal sees of a server: who asked for what, and how it ends."""

import os
import re
import signal
import socket
from pathlib import Path
from urllib.parse import urlparse

from tests.server.conftest import StartTiny
from tests.support.server_process import PATIENCE_S, Server, Stream, has_ended, wait_until
from tests.support.tiny_folder import ENDLESS

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
SECRETS = ("friend", "wrong-key", "a secret prompt", "?hush")


def test_every_request_has_a_line_that_says_nothing_it_should_not(friendly: Server) -> None:
    before = len(friendly.log)
    body = {"text": "a secret prompt", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "n": 2}}
    for stream in (False, True):
        assert friendly.post("/generate?hush", {**body, "stream": stream}).status_code == 200
    friendly.http.get("/health")
    friendly.http.get("/metrics")
    friendly.http.get("/v1/models", headers={"authorization": "Bearer wrong-key"})
    friendly.http.get("/v1/sessions/none")
    wait_until(lambda: "/v1/sessions/none" in friendly.log)
    lines = [line for line in friendly.log[before:].splitlines() if re.match(STAMP, line)]
    generated = r"POST /generate 200 \d+\.\d{3} s, \d+ \+ 6 tokens, 127\.0\.0\.1"
    expected = (generated, generated, r"GET /v1/models 401 .* s, 127.*", r"GET /v1/sessions/none 404 .* s, 127.*")
    assert len(lines) == len(expected), lines  # good probes are not told of
    for line, form in zip(lines, expected, strict=True):
        assert re.fullmatch(STAMP + form, line), line
    assert not [secret for secret in SECRETS if secret in friendly.log]


def test_no_client_writes_lines_of_its_own(friendly: Server) -> None:
    for path in ("/%0a2025-01-01%20forged", "/%1b[2J", "/v1/sessions/%00%0d", "/%e2%80%ae", "/" + "a" * 20000):
        assert friendly.http.get(path).status_code == 404
    wait_until(lambda: "/aaaa" in friendly.log)
    assert all(line.isprintable() and len(line) < 1000 for line in friendly.log.split("\n"))
    assert "\\n2025-01-01 forged 404" in friendly.log


def test_nonsense_fills_no_log(friendly: Server) -> None:
    place, before = urlparse(friendly.url), len(friendly.log)
    for _ in range(500):
        with socket.create_connection((place.hostname, place.port)) as line:
            line.sendall(b"\x00nonsense\r\n\r\n")
            assert line.recv(100).startswith(b"HTTP/1.1 400 ")
    assert len(friendly.log) - before < 5000


def test_a_port_in_use_is_said_in_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = Server(tmp_path, "--port", port, "--model", str(tmp_path / "no such model"), wait=False)
        assert server.process.wait(PATIENCE_S) == 2
    said = f"--port {port} at 127.0.0.1 is in use by another program: give another --port"
    assert server.log == f"roost serve: error: {said}\n"
    server.kill()


def test_a_second_ctrl_c_ends_it_at_once(start_tiny: StartTiny) -> None:
    server = start_tiny()
    stream = Stream(server, "/generate", {"text": "a", "sampling_params": ENDLESS, "stream": True})
    stream.next()
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: "roost: stopping" in server.log)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(PATIENCE_S) == 130
    wait_until(lambda: has_ended(server.engine_pid))
    assert server.log.endswith("roost: stopped at once\n")
    assert "Traceback" not in server.log
    assert server.litter() == []


def test_ctrl_c_while_the_model_is_loaded_is_no_traceback(tmp_path: Path, tiny_model: Path) -> None:
    server = Server(tmp_path, "--model", str(tiny_model), wait=False)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    wait_until(children.read_text)  # the engine's process
    os.kill(server.process.pid, signal.SIGINT)
    assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in server.log
    assert server.litter() == []
    server.kill()
