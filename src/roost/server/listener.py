"""Listener: the listening sockets, and how many connections may be open.

Bound before a model is fetched or loaded, so that a port in use is reported at once. Accepts no more than the system
has file descriptors for; when all slots are taken by requests at work, newcomers are refused cheaply. Called by the
command line; uvicorn's loop accepts on its sockets.
"""

import errno
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from roost.errors import ConfigError
from roost.server.config import CONNECTIONS_DEFAULT, ServerConfig
from roost.server.connections import PROBE_SLOTS, Connections
from roost.server.early_refusals import full

_OWN_FILES = 64  # file descriptors other than connections: the engine's sockets and pipes, modules, devices
_BURST = 64  # connections accepted or refused before the event loop does something else
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """A listening socket that accepts as long as there is a slot."""

    def __init__(self, family: int, connections: Connections) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else the loop sends late
        self._connections = connections
        self._has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; `BlockingIOError` if there is none now, or if another must be closed first."""
        if self._has_failed:  # the loop calls on in this pass, although it waits a second before the next
            self._has_failed = False
            raise BlockingIOError
        connections = self._connections
        if connections.num_arriving >= _BURST:
            raise BlockingIOError
        if connections.is_full and (connections.num_arriving or connections.evict()):
            raise BlockingIOError  # soon one of the newcomers can be evicted, or the evicted one is closed
        try:
            for _ in range(_BURST):
                accepted, address = super().accept()
                if not connections.is_full:
                    connections.accepted()
                    return accepted, address
                refuse(accepted)
        except OSError as error:
            self._has_failed = error.errno in _EXHAUSTED
            while self._has_failed and connections.evict():  # the loop tries again in a second
                pass
            raise
        raise BlockingIOError


def refuse(connection: socket.socket) -> None:
    """Send that the server is full, as far as that is possible without waiting, and close."""
    with suppress(OSError), connection:
        connection.setblocking(False)
        connection.send(full())


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """The bound sockets, and the connections that they have accepted."""

    connections: Connections
    sockets: list[socket.socket]

    @property
    def port(self) -> int:
        """The port; with --port 0 the system chose it."""
        return int(self.sockets[0].getsockname()[1])


def bind_listeners(config: ServerConfig) -> Listeners:
    """Bind the server's address; raises ConfigError if that is not possible."""
    connections = Connections(_num_slots(config), config.max_connections_per_address)
    sockets: list[socket.socket] = []
    port = config.port
    for family, host in _addresses(config):
        listener = Listener(family, connections)
        sockets.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            for each in sockets:
                each.close()
            raise cannot_listen(config, error) from error
        port = listener.getsockname()[1]  # the same for all addresses
    return Listeners(connections=connections, sockets=sockets)


def cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    """Why the server's address cannot be bound."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port {config.port} at {config.host} is in use by another program: give another --port")
    return ConfigError(f"cannot listen at --host {config.host} --port {config.port}: {error.strerror or error}")


def _addresses(config: ServerConfig) -> Iterator[tuple[int, str]]:
    """Address families and addresses of --host."""
    try:
        found = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {config.host} is neither an address nor a name that resolves to one") from error
    return iter(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _num_slots(config: ServerConfig) -> int:
    """How many connections may be open; raises the limit of open files if needed and allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_others = _OWN_FILES + PROBE_SLOTS
    wanted = (config.max_connections or CONNECTIONS_DEFAULT) + num_others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    num_slots = (soft if soft != resource.RLIM_INFINITY else wanted) - num_others
    if num_slots < (config.max_connections or 1):
        needed = (config.max_connections or 1) + num_others
        raise ConfigError(
            f"--max-connections {config.max_connections or 1} needs {needed} open files, the system allows {soft}: "
            "raise its limit (ulimit -Hn)"
        )
    return config.max_connections or min(num_slots, CONNECTIONS_DEFAULT)
