"""Who has a place, and who has to leave."""

from roost.server.connections import PROBE_SLOTS, Connections, Wait, network_of


class FakeConnection:
    """Somebody who can be made to leave."""

    def __init__(self) -> None:
        self.has_left = False

    def evict(self) -> None:
        """Leave."""
        self.has_left = True


def enter(connections: Connections, address: str = "10.0.0.1", wait: Wait | None = Wait.REQUEST) -> FakeConnection:
    """One more connection, who must get a place."""
    connection = FakeConnection()
    connections.accepted()
    assert connections.enter(connection, address) is not None
    connections.wait(connection, wait)
    return connection


def test_the_longest_waiting_leaves_and_who_sends_a_body_after_all_others() -> None:
    connections = Connections(4)
    body, worker = enter(connections, wait=Wait.BODY), enter(connections, wait=None)
    idle, late = enter(connections), enter(connections)
    connections.wait(idle, None)
    connections.wait(idle, Wait.REQUEST)  # it had a request; now it waits behind the other
    order = []
    for _ in range(3):
        connections.wait(enter(connections), None)
        order += [connection for connection in (late, idle, body) if connection.has_left and connection not in order]
    assert order == [late, idle, body]
    assert not worker.has_left


def test_when_all_are_at_work_newcomers_get_probe_slots_and_then_nothing() -> None:
    connections = Connections(2)
    workers = [enter(connections, wait=None) for _ in range(2)]
    probes = []
    for _ in range(PROBE_SLOTS):
        connection = FakeConnection()
        connections.accepted()
        assert connections.enter(connection, "10.0.0.1") is connections.probe_slots
        probes.append(connection)
    assert connections.is_full
    refused = FakeConnection()
    connections.accepted()
    assert connections.enter(refused, "10.0.0.1") is None
    connections.closed(refused)
    connections.closed(workers[0])
    assert not connections.is_full
    connection = FakeConnection()
    connections.accepted()
    assert connections.enter(connection, "10.0.0.1") is not connections.probe_slots
    assert not any(each.has_left for each in (*workers, *probes))


def test_an_address_with_its_share_gives_up_its_own() -> None:
    connections = Connections(10, 2)
    mine, theirs = enter(connections), enter(connections, "10.0.0.2")
    enter(connections)
    enter(connections)
    assert (mine.has_left, theirs.has_left) == (True, False)


def test_nothing_is_kept_of_who_has_left() -> None:
    connections = Connections(2, 1)
    for number in range(100):
        connections.closed(enter(connections, f"10.0.0.{number}"))
    connections.closed(enter(connections, "10.0.0.1"))
    assert not connections._by_address
    assert not connections._slots_of


def test_of_ipv6_a_network_is_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2:3") != network_of("2001:db8:0:1::1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
    assert network_of("10.0.0.1") != network_of("10.0.0.2")
