"""Connections: which are open, what the server waits for on each, and which one is evicted when there is no slot left.

Only a connection that the server waits for can be evicted: the longest-waiting first, and those that are sending a body
last. When requests at work take all slots, a few extra ones are left for health probes. Knows nothing of sockets or
HTTP. Called by the listeners and by each connection.
"""

import ipaddress
from enum import IntEnum
from typing import Protocol

PROBE_SLOTS = 16  # beyond the limit, for health probes only


class Wait(IntEnum):
    """What the server waits for, in the order in which connections are evicted."""

    REQUEST = 0
    BODY = 1


class Evictable(Protocol):
    """A connection that takes a slot."""

    def evict(self) -> None:
        """Close at once."""


class ConnectionSlots:
    """A limited number of slots, and the connections that have them."""

    def __init__(self, num_slots: int, name: str = "") -> None:
        self._num_slots = num_slots
        self.name = name
        self._members: set[Evictable] = set()
        self._waiting: dict[Wait, dict[Evictable, None]] = {wait: {} for wait in Wait}  # longest-waiting first

    @property
    def has_free(self) -> bool:
        """Whether one more connection fits."""
        return len(self._members) < self._num_slots

    @property
    def is_empty(self) -> bool:
        """Whether no connection has a slot."""
        return not self._members

    def enter(self, connection: Evictable) -> None:
        """Take a slot."""
        assert self.has_free
        self._members.add(connection)

    def leave(self, connection: Evictable) -> None:
        """Free a slot."""
        self.wait(connection, None)
        self._members.remove(connection)

    def wait(self, connection: Evictable, wait: Wait | None) -> None:
        """Note what the server waits for on a connection; None: the client waits for the server."""
        for waiting in self._waiting.values():
            waiting.pop(connection, None)
        if wait is not None:
            self._waiting[wait][connection] = None

    def next_to_evict(self) -> Evictable | None:
        """The connection that loses least; None if all are at work."""
        return next((connection for waiting in self._waiting.values() for connection in waiting), None)


class Connections:
    """All connections: the main slots, those for probes, and those of each address where these are limited."""

    def __init__(self, num_slots: int, num_slots_per_address: int | None = None) -> None:
        self.num_slots = num_slots
        self._num_per_address = num_slots_per_address
        self._main = ConnectionSlots(num_slots)
        self.probe_slots = ConnectionSlots(PROBE_SLOTS)
        self._by_address: dict[str, ConnectionSlots] = {}
        self._slots_of: dict[Evictable, tuple[ConnectionSlots, ...]] = {}  # all that a connection takes a slot of
        self.num_open = 0  # sockets, including those that have no slot yet or are being closed
        self.num_arriving = 0  # of those, accepted and not yet given a slot

    @property
    def is_full(self) -> bool:
        """Whether one more socket would be too many."""
        return self.num_open >= self.num_slots + PROBE_SLOTS

    def accepted(self) -> None:
        """A socket was accepted."""
        self.num_open += 1
        self.num_arriving += 1

    def closed(self, connection: Evictable) -> None:
        """A socket was closed."""
        self.num_open -= 1
        self._leave(connection)

    def enter(self, connection: Evictable, address: str) -> ConnectionSlots | None:
        """Give a new connection a slot, evicting another if need be; returns which kind, None if all are at work."""
        self.num_arriving -= 1
        by_address = self._address_slots(address)
        if not all(map(self._make_room, by_address)):
            return None
        for slots in (self._main, self.probe_slots):
            if self._make_room(slots):
                self._slots_of[connection] = (slots, *by_address)
                for each in self._slots_of[connection]:
                    each.enter(connection)
                return slots
        return None

    def wait(self, connection: Evictable, wait: Wait | None) -> None:
        """Note what the server waits for on a connection; None: the client waits for the server."""
        for slots in self._slots_of.get(connection, ()):
            slots.wait(connection, wait)

    def evict(self) -> bool:
        """Evict one connection; False if all are at work."""
        return self._evict_from(self.probe_slots) or self._evict_from(self._main)

    def _make_room(self, slots: ConnectionSlots) -> bool:
        return slots.has_free or self._evict_from(slots)

    def _evict_from(self, slots: ConnectionSlots) -> bool:
        connection = slots.next_to_evict()
        if connection is None:
            return False
        self._leave(connection)
        connection.evict()
        return True

    def _leave(self, connection: Evictable) -> None:
        for slots in self._slots_of.pop(connection, ()):
            slots.leave(connection)
            if slots.is_empty:
                self._by_address.pop(slots.name, None)

    def _address_slots(self, address: str) -> tuple[ConnectionSlots, ...]:
        """The slots of an address, where there is a limit for one."""
        if self._num_per_address is None:
            return ()
        network = network_of(address)
        return (self._by_address.setdefault(network, ConnectionSlots(self._num_per_address, network)),)


def network_of(address: str) -> str:
    """The network that counts as one address: an IPv4 address itself, the /64 of an IPv6 one."""
    if ":" not in address:
        return address
    return str(ipaddress.IPv6Network((int(ipaddress.IPv6Address(address)), 64), strict=False))
