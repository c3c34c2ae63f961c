"""Who comes in: as many as there are file descriptors for, and not so many at a time that nobody else has a turn."""

import resource
import socket
from contextlib import ExitStack

import pytest

from roost.errors import ConfigError
from roost.server.config import CONNECTIONS_DEFAULT, ServerConfig
from roost.server.connections import PROBE_SLOTS, Connections
from roost.server.listener import _BURST, _OWN_FILES, Listener, bind_listeners

OTHERS = _OWN_FILES + PROBE_SLOTS  # files that are for no place


@pytest.mark.parametrize(
    ("num_files", "asked", "places"),
    [
        (OTHERS + 5, None, 5),
        (OTHERS + 5, 5, 5),
        (OTHERS + 4, 5, None),
        (OTHERS, None, None),
        (OTHERS + CONNECTIONS_DEFAULT, None, CONNECTIONS_DEFAULT),
        (OTHERS + CONNECTIONS_DEFAULT + 1, None, CONNECTIONS_DEFAULT),
        (OTHERS + CONNECTIONS_DEFAULT + 1, CONNECTIONS_DEFAULT + 1, CONNECTIONS_DEFAULT + 1),
    ],
)
def test_places_are_what_the_system_has_files_for_beside_the_servers_own(
    monkeypatch: pytest.MonkeyPatch, num_files: int, asked: int | None, places: int | None
) -> None:
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10, num_files))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: set_to.append(limits))
    config = ServerConfig(port=0, max_connections=asked)
    if places is None:
        with pytest.raises(ConfigError, match=f"needs {OTHERS + (asked or 1)} open files, the system allows"):
            bind_listeners(config)
        return
    listeners = bind_listeners(config)
    assert listeners.connections.num_slots == places
    assert set_to == [(OTHERS + places, num_files)], "no more than is needed"
    for listener in listeners.sockets:
        listener.close()


def _arrive(stack: ExitStack, connections: Connections) -> Listener:
    """A listener at which one more waits than are looked at in one go."""
    listener = stack.enter_context(Listener(socket.AF_INET, connections))
    listener.bind(("127.0.0.1", 0))
    listener.listen(_BURST + 1)
    listener.setblocking(False)
    for _ in range(_BURST + 1):
        stack.enter_context(socket.create_connection(listener.getsockname()))
    return listener


def test_so_many_are_taken_at_a_time_and_no_more() -> None:
    connections = Connections(2 * _BURST)
    with ExitStack() as stack:
        listener = _arrive(stack, connections)
        for _ in range(_BURST):
            stack.enter_context(listener.accept()[0])
        with pytest.raises(BlockingIOError):
            listener.accept()
        connections.num_arriving -= 1  # one has entered
        stack.enter_context(listener.accept()[0])


def test_so_many_are_refused_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[socket.socket] = []
    monkeypatch.setattr("roost.server.listener.refuse", refused.append)
    connections = Connections(1)
    connections.num_open = 1 + PROBE_SLOTS  # all of them at work
    with ExitStack() as stack:
        listener = _arrive(stack, connections)
        for num_refused in (_BURST, _BURST + 1):
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert len(refused) == num_refused
        for line in refused:
            line.close()
