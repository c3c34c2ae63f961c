"""The engine's process: whatever has come together goes out in order, in messages that are not too long."""

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest
import zmq

from roost.messages import Tokens
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
