"""Where requests go: to who holds what they name, else by load and prompt, whatever comes and goes meanwhile."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from roost.router.placement import BLOCK_LEN, PROMPT_BLOCKS_MAX, SLACK, Placement, Wanted, blocks_of, key_of

NAMES = [f"r{number}" for number in range(5)]
KEYS = [key_of("session", "", str(number)) for number in range(12)]
KEYS_MAX, BLOCKS_MAX = 8, 6
_key = st.sampled_from(KEYS)
_replica = st.sampled_from(NAMES)
_loads = st.dictionaries(_replica, st.integers(0, 12))
_blocks = st.sampled_from([(b"a", b"aa", b"aaa"), (b"a", b"aa", b"aab", b"aabb"), (b"c",), ()])


def _placement(*replicas: str) -> Placement:
    placement = Placement()
    placement.update(replicas)
    return placement


class Routers(RuleBasedStateMachine):
    """A router beside a plain model of it: who was last said to hold a key."""

    @initialize()
    def begin(self) -> None:
        self.placement = Placement(keys_max=KEYS_MAX, blocks_max=BLOCKS_MAX)
        self.live = {NAMES[0]}
        self.placement.update(self.live)
        self.held: dict[bytes, str] = {}
        self.lost: set[bytes] = set()

    @rule(live=st.sets(_replica, min_size=1))
    def replicas_come_and_go(self, live: set[str]) -> None:
        self.live = live
        self.placement.update(live)
        self.lost |= {key for key, each in self.held.items() if each not in live}
        self.held = {key: each for key, each in self.held.items() if each in live}

    @rule(replica=_replica, keys=st.lists(_key, max_size=3))
    def a_replica_takes_keys(self, replica: str, keys: list[bytes]) -> None:
        self.placement.learn(replica, keys)
        if replica in self.live:
            self.lost.difference_update(keys)
            for key in keys:
                self._holds(key, replica)

    @rule(replica=_replica, keys=st.lists(_key, max_size=3))
    def a_replica_reports(self, replica: str, keys: list[bytes]) -> None:
        self.placement.report(replica, keys)
        if replica in self.live:
            for key in keys:
                self.lost.discard(key)
                if key not in self.held:
                    self._holds(key, replica)

    @rule(keys=st.lists(_key, max_size=2), labels=st.lists(_key, max_size=1), blocks=_blocks, loads=_loads)
    def a_request_comes(
        self, keys: list[bytes], labels: list[bytes], blocks: tuple[bytes, ...], loads: dict[str, int]
    ) -> None:
        wanted = Wanted(keys=tuple(keys), labels=tuple(labels), blocks=blocks)
        holder = next((self.held[key] for key in [*keys, *labels] if key in self.held), None)
        assert self.placement.holder(wanted) == holder
        assert not self.placement.is_lost(wanted) or self.lost.intersection(keys)
        chosen = self.placement.choose(wanted, loads)
        assert chosen in self.live
        if holder is not None:
            assert chosen == holder
        elif not keys:
            assert loads.get(chosen, 0) <= min(loads.get(each, 0) for each in self.live) + SLACK
        for key in [*keys, *labels]:
            self._holds(key, chosen)
        assert self.placement.shared_len(chosen, blocks) == len(blocks)  # it has run this prompt

    @rule()
    def the_router_begins_anew(self) -> None:
        again = Placement(keys_max=KEYS_MAX, blocks_max=BLOCKS_MAX)
        again.update(self.live)
        self.held = dict(sorted(self.held.items(), key=lambda item: item[1]))  # in the order of the reports
        for key, replica in self.held.items():
            again.report(replica, [key])
        self.placement = again
        assert {key: again.holder(Wanted(keys=(key,))) for key in self.held} == self.held

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.placement.num_keys <= KEYS_MAX

    def _holds(self, key: bytes, replica: str) -> None:
        """The least recently used goes first, as in the router."""
        self.held.pop(key, None)
        self.held[key] = replica
        if len(self.held) > KEYS_MAX:
            del self.held[next(iter(self.held))]


TestRouters = Routers.TestCase


@given(st.sets(_replica, min_size=1), _key, _loads, _loads)
def test_routers_that_know_nothing_of_a_key_agree_on_its_place(
    live: set[str], key: bytes, one: dict[str, int], other: dict[str, int]
) -> None:
    wanted = Wanted(keys=(key,))
    assert _placement(*live).choose(wanted, one) == _placement(*sorted(live, reverse=True)).choose(wanted, other)


def test_a_replica_that_goes_moves_its_own_keys_alone_and_evenly() -> None:
    placement = _placement("a", "b", "c", "d")
    many = [key_of("session", "", str(number)) for number in range(400)]
    before = {key: placement.choose(Wanted(keys=(key,)), {}) for key in many}
    assert min(Counter(before.values()).values()) > 50
    placement.update(["a", "b", "d"])
    assert placement.is_lost(Wanted(keys=(next(key for key in many if before[key] == "c"),)))
    after = {key: placement.choose(Wanted(keys=(key,)), {}) for key in many}
    for key, each in after.items():
        placement.learn(each, [key])
    assert not any(placement.is_lost(Wanted(keys=(key,))) for key in many)
    assert all(after[key] == before[key] for key in many if before[key] != "c")
    moved = Counter(after[key] for key in many if before[key] == "c")
    assert set(moved) == {"a", "b", "d"}


def test_a_prompt_goes_where_its_beginning_has_run_until_that_replica_has_too_much_more_to_do() -> None:
    placement = _placement("a", "b")
    blocks = blocks_of(b"system prompt " * BLOCK_LEN)
    first = placement.choose(Wanted(blocks=blocks), {})
    (other,) = {"a", "b"} - {first}
    assert placement.choose(Wanted(blocks=blocks), {first: SLACK}) == first
    assert placement.choose(Wanted(blocks=blocks), {first: SLACK + 1}) == other


def test_of_two_beginnings_the_longer_one_decides() -> None:
    placement = _placement("a", "b")
    short, long = b"x" * BLOCK_LEN, b"x" * BLOCK_LEN * 3
    one = placement.choose(Wanted(blocks=blocks_of(short)), {})
    two = placement.choose(Wanted(blocks=blocks_of(long)), {one: SLACK + 1})
    assert one != two
    assert placement.choose(Wanted(blocks=blocks_of(long + b"y" * BLOCK_LEN)), {}) == two


def test_requests_that_say_nothing_go_around() -> None:
    placement = _placement("a", "b", "c")
    assert sorted(placement.choose(Wanted(), {}) for _ in range(3)) == ["a", "b", "c"]


def test_only_so_much_of_a_prompt_is_looked_at() -> None:
    whole = blocks_of(b"z" * BLOCK_LEN * PROMPT_BLOCKS_MAX)
    assert len(whole) == PROMPT_BLOCKS_MAX
    assert blocks_of(b"z" * BLOCK_LEN * (PROMPT_BLOCKS_MAX + 1)) == whole
    assert blocks_of(b"z" * (BLOCK_LEN - 1)) == ()


@given(st.text(), st.text(), st.text(), st.text())
def test_keys_of_different_names_differ(one: str, other: str, client: str, of: str) -> None:
    assert (key_of("session", client, one) == key_of("session", of, other)) == ((client, one) == (of, other))
    assert key_of("session", client, one) != key_of("label", client, one)
