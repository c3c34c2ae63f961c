"""The log of a server as JSON: an object in every line, of both processes, and nothing that a client said."""

import json
from typing import Any

import pytest

from tests.server.conftest import StartTiny
from tests.support.server_process import Server, wait_until

SECRETS = ("a secret prompt", "a secret value")


def lines_of(server: Server) -> list[dict[str, Any]]:
    """Every line of the log, each of which must be an object."""
    return [json.loads(line) for line in server.log.splitlines()]


def test_everything_that_a_server_logs_is_json(start_tiny: StartTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_MAX_RUNING", "a secret value")
    server = start_tiny("--log-format", "json", "--log-level", "debug", "--log-slow-s", "0", "--max-running", "2")
    body = {"text": "a secret prompt", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    server.generate(body)
    assert server.post("/generate", {**body, "sampling_params": {"temperature": "a secret value"}}).status_code == 400
    wait_until(lambda: '"status": 400, "ms"' in server.log)
    assert server.stop() == 0
    assert not [secret for secret in SECRETS if secret in server.log]
    lines = lines_of(server)
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    by_logger = {line["logger"]: line for line in lines}
    assert {"roost.notices", "roost.requests", "roost.outputs", "roost.refusals", "roost.engine"} <= set(by_logger)
    assert lines[0]["level"] == "warning" and "$ROOST_MAX_RUNING is ignored" in lines[0]["message"]
    (ready,) = (line for line in lines if "is ready at" in line["message"])
    assert ready["max_running"] == 2 and ready["device"] == "cpu" and "tool_calls" in ready
    good, bad = (line for line in lines if line["logger"] == "roost.requests")
    assert (good["method"], good["path"], good["status"], good["client"]) == ("POST", "/generate", 200, "127.0.0.1")
    assert good["completion_tokens"] == 3 and good["ms"] > 0 and bad["status"] == 400
    (output,) = (line for line in lines if line["logger"] == "roost.outputs")
    assert (output["level"], output["reason"], output["completion_tokens"]) == ("info", "length", 3)
    assert by_logger["roost.refusals"]["reason"] == "parameter sampling_params.temperature"
    ended = [line["event"] for line in lines if line["logger"] == "roost.engine"]
    assert ended == ["admit", "end_length"]
    assert any(line["message"] == "stopping" for line in lines)


def test_an_engine_that_cannot_start_says_so_in_json(start_tiny: StartTiny) -> None:
    server = start_tiny("--log-format", "json", "--page-size", "0", wait=False)
    assert server.process.wait() == 2
    (said,) = (line for line in lines_of(server) if line["level"] == "error")
    assert "--page-size must be" in said["message"]
