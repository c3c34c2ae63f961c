"""Connections: who is connected, whom the server waits for, and who has to leave when there is no room.

Only who is being waited for can be made to leave: the longest-waiting first, who is sending a body after all others.
When all places are taken by requests at work there is still a lobby, for probes. Knows nothing of sockets or HTTP.
Called by the listeners and by each connection.
"""

import ipaddress
from enum import IntEnum
from typing import Protocol

LOBBY_PLACES = 16  # beyond the limit, for who only asks about health


class Wait(IntEnum):
    """What the server waits for, the least loss first."""

    REQUEST = 0
    BODY = 1


class Guest(Protocol):
    """Who takes a place."""

    def evict(self) -> None:
        """Leave at once."""


class Room:
    """A number of places, and who has them."""

    def __init__(self, num_places: int, name: str = "") -> None:
        self._num_places = num_places
        self.name = name
        self._guests: set[Guest] = set()
        self._waiting: dict[Wait, dict[Guest, None]] = {wait: {} for wait in Wait}  # in the order they began to wait

    @property
    def has_place(self) -> bool:
        """Whether one more may enter."""
        return len(self._guests) < self._num_places

    @property
    def is_empty(self) -> bool:
        """Whether nobody is here."""
        return not self._guests

    def enter(self, guest: Guest) -> None:
        """Take a place."""
        assert self.has_place
        self._guests.add(guest)

    def leave(self, guest: Guest) -> None:
        """Give a place back."""
        self.wait(guest, None)
        self._guests.remove(guest)

    def wait(self, guest: Guest, wait: Wait | None) -> None:
        """From now on this is waited for; None: the guest waits for the server."""
        for waiting in self._waiting.values():
            waiting.pop(guest, None)
        if wait is not None:
            self._waiting[wait][guest] = None

    def first_to_leave(self) -> Guest | None:
        """Who would lose least, None if all are at work."""
        return next((guest for waiting in self._waiting.values() for guest in waiting), None)


class Connections:
    """All connections: a main room, a lobby, and a room for each address where its guests are limited."""

    def __init__(self, num_places: int, num_places_per_address: int | None = None) -> None:
        self.num_places = num_places
        self._num_per_address = num_places_per_address
        self._main = Room(num_places)
        self.lobby = Room(LOBBY_PLACES)
        self._of_address: dict[str, Room] = {}
        self._rooms: dict[Guest, tuple[Room, ...]] = {}  # that a guest is in
        self.num_open = 0  # sockets, also of who has not entered yet or is about to leave
        self.num_arriving = 0  # of those, accepted and not yet entered

    @property
    def is_full(self) -> bool:
        """Whether one socket more would be one too many."""
        return self.num_open >= self.num_places + LOBBY_PLACES

    def accepted(self) -> None:
        """There is one more socket."""
        self.num_open += 1
        self.num_arriving += 1

    def closed(self, guest: Guest) -> None:
        """A socket is gone."""
        self.num_open -= 1
        self._leave(guest)

    def enter(self, guest: Guest, address: str) -> Room | None:
        """Give a new guest a place, if need be another's, and say in which room; None if all are at work."""
        self.num_arriving -= 1
        near = self._near(address)
        if not all(map(self._make_place, near)):
            return None
        for room in (self._main, self.lobby):
            if self._make_place(room):
                self._rooms[guest] = (room, *near)
                for each in self._rooms[guest]:
                    each.enter(guest)
                return room
        return None

    def wait(self, guest: Guest, wait: Wait | None) -> None:
        """From now on this is waited for; None: the guest waits for the server."""
        for room in self._rooms.get(guest, ()):
            room.wait(guest, wait)

    def evict(self) -> bool:
        """Make one leave; False if all are at work."""
        return self._evict_from(self.lobby) or self._evict_from(self._main)

    def _make_place(self, room: Room) -> bool:
        return room.has_place or self._evict_from(room)

    def _evict_from(self, room: Room) -> bool:
        guest = room.first_to_leave()
        if guest is None:
            return False
        self._leave(guest)
        guest.evict()
        return True

    def _leave(self, guest: Guest) -> None:
        for room in self._rooms.pop(guest, ()):
            room.leave(guest)
            if room.is_empty:
                self._of_address.pop(room.name, None)

    def _near(self, address: str) -> tuple[Room, ...]:
        """The room of an address, where there is a limit for one."""
        if self._num_per_address is None:
            return ()
        network = network_of(address)
        return (self._of_address.setdefault(network, Room(self._num_per_address, network)),)


def network_of(address: str) -> str:
    """Whose address it is: of IPv6 everybody has a whole /64."""
    if ":" not in address:
        return address
    return str(ipaddress.IPv6Network((int(ipaddress.IPv6Address(address)), 64), strict=False))
