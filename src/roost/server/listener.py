"""Listener: the sockets that connections come in by, and how many of them may be open.

Bound before a model is fetched or loaded, so that a port in use is said at once. Accepts no more than the system has
file descriptors for; who finds all places taken by requests at work is told so and costs nobody else anything. Called
by the command line; its sockets are given to uvicorn, whose loop accepts.
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
from roost.server.connections import LOBBY_PLACES, Connections
from roost.server.early_refusals import full

_OWN_FILES = 64  # file descriptors for what is no connection: the engine's sockets and pipes, modules, devices
_BURST = 64  # connections taken, or refused, before the loop does something else
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Listener(socket.socket):
    """A socket that accepts as long as there is room."""

    def __init__(self, family: int, connections: Connections) -> None:
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else the loop sends late
        self._connections = connections
        self._has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection; `BlockingIOError` if there is none now, or if others have to leave first."""
        if self._has_failed:  # the loop asks on, although it will only look again in a second
            self._has_failed = False
            raise BlockingIOError
        connections = self._connections
        if connections.num_arriving >= _BURST:
            raise BlockingIOError
        if connections.is_full and (connections.num_arriving or connections.evict()):
            raise BlockingIOError  # soon somebody will have entered who can be made to leave, or will have left
        try:
            for _ in range(_BURST):
                line, address = super().accept()
                if not connections.is_full:
                    connections.accepted()
                    return line, address
                refuse(line)
        except OSError as error:
            self._has_failed = error.errno in _EXHAUSTED
            while self._has_failed and connections.evict():  # the loop tries again in a second
                pass
            raise
        raise BlockingIOError


def refuse(line: socket.socket) -> None:
    """Say that there is no room, as far as that can be said without waiting."""
    with suppress(OSError), line:
        line.setblocking(False)
        line.send(full())


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Where connections come in, and who has."""

    connections: Connections
    listeners: list[socket.socket]

    @property
    def port(self) -> int:
        """The port that is listened at: with --port 0 the system chose it."""
        return int(self.listeners[0].getsockname()[1])


def open_entrance(config: ServerConfig) -> Entrance:
    """Bind the server's address; raises ConfigError if that cannot be."""
    connections = Connections(_num_places(config), config.max_connections_per_address)
    listeners: list[socket.socket] = []
    port = config.port
    for family, host in _addresses(config):
        listener = Listener(family, connections)
        listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            for each in listeners:
                each.close()
            raise cannot_listen(config, error) from error
        port = listener.getsockname()[1]  # one for all addresses
    return Entrance(connections=connections, listeners=listeners)


def cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    """Why the server's address cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"--port {config.port} at {config.host} is in use by another program: give another --port")
    return ConfigError(f"--host {config.host} --port {config.port} cannot be listened at: {error.strerror or error}")


def _addresses(config: ServerConfig) -> Iterator[tuple[int, str]]:
    """Address families and addresses of a name."""
    try:
        found = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {config.host} is no address and no name that has one") from error
    return iter(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _num_places(config: ServerConfig) -> int:
    """How many connections may be open; the limit of open files is raised if it must be and can be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_others = _OWN_FILES + LOBBY_PLACES
    wanted = (config.max_connections or CONNECTIONS_DEFAULT) + num_others
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    num_places = (soft if soft != resource.RLIM_INFINITY else wanted) - num_others
    if num_places < (config.max_connections or 1):
        needed = (config.max_connections or 1) + num_others
        raise ConfigError(
            f"--max-connections {config.max_connections or 1} needs {needed} open files, the system allows {soft}: "
            "raise its limit (ulimit -Hn)"
        )
    return config.max_connections or min(num_places, CONNECTIONS_DEFAULT)
