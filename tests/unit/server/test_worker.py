"""The engine's process: whatever has come together goes out in order, in messages that are not too long."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from roost.config.options import EngineConfig
from roost.messages import Tokens
from roost.server.logs import JSON, LogConfig
from roost.server.wire_format import unpack
from roost.server.worker import _BATCH_MAX, Outbox, _write


@pytest.mark.parametrize("num_events", [1, _BATCH_MAX, _BATCH_MAX + 1, 3 * _BATCH_MAX + 7])
def test_events_that_came_together_leave_together_in_order_and_none_is_lost(tmp_path: Path, num_events: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox: Outbox = SimpleQueue()
    with context.socket(zmq.PULL) as socket:
        socket.bind(f"ipc://{tmp_path / 'events'}")
        for number in range(num_events):
            outbox.put((number, Tokens(request_id="r", tokens=(number,))))
        threading.Thread(target=_write, args=(context, tmp_path, outbox), daemon=True).start()
        messages = []
        while sum(map(len, messages)) < num_events:
            assert socket.poll(60_000), "nothing comes any more"
            messages.append(list(unpack(socket.recv())))
    assert [len(each) for each in messages[:-1]] == [_BATCH_MAX] * ((num_events - 1) // _BATCH_MAX)
    assert [number for message in messages for number, _ in message] == list(range(num_events))


FAILS = """
import sys, threading, types
from roost.server import worker

def run():
    {run}

def start(config, trace, on_lost, folder):
    trace.note("admit", "r1", 0, 4)
    return types.SimpleNamespace(engine=types.SimpleNamespace(run=run))

worker.start, worker._started = start, lambda running: None
worker._read = worker._write = lambda *args: None
sys.exit(worker.main())
"""
IN_A_THREAD = "thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()"


@pytest.mark.parametrize(
    ("run", "message"), [("1 / 0", "the engine failed"), (IN_A_THREAD, "a thread of the engine failed")]
)
def test_an_engine_that_fails_says_why_in_the_form_of_the_log(tmp_path: Path, run: str, message: str) -> None:
    command = [sys.executable, "-c", FAILS.format(run=run)]
    settings = {"folder": str(tmp_path), "first": 1, "config": EngineConfig(), "log": LogConfig(format=JSON)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()  # and stays open: the server lives
        said = json.loads(process.stderr.readline())
        assert process.wait(120) == 1
    assert (said["level"], said["logger"], said["message"]) == ("critical", "roost.engine", message)
    assert "ZeroDivisionError" in said["exception"]
    assert said.get("last_events") == (["admit r1 0 4"] if run == "1 / 0" else None)
