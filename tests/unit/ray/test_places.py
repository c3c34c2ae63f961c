"""What one process knows of the replicas: their reports, their news, and the calls under way."""

import pickle

from roost.ray.places import HELD, Address, Places
from roost.router.placement import SLACK, Wanted, key_of

KEYS = [key_of("session", "", str(number)) for number in range(3)]


def test_reports_are_read_and_news_are_over_them() -> None:
    places = Places()
    places.update({"a": {HELD: b"".join(KEYS)}, "b": {}})
    assert {places.holder(Wanted(keys=(key,))) for key in KEYS} == {"a"}
    places.learn("b", KEYS[:1])
    places.update({"a": {HELD: b"".join(KEYS)}, "b": {}})  # an old report
    assert [places.holder(Wanted(keys=(key,))) for key in KEYS] == ["b", "a", "a"]
    places.update({"b": {}})
    assert [places.holder(Wanted(keys=(key,))) for key in KEYS] == ["b", None, None]


def test_calls_of_this_process_count_as_load() -> None:
    places = Places()
    places.update({"a": {}, "b": {}})
    for _ in range(SLACK + 1):
        places.begin("a")
    assert {places.choose(Wanted(), {}) for _ in range(3)} == {"b"}
    for _ in range(SLACK + 1):
        places.end("a")
    assert {places.choose(Wanted(), {"b": SLACK + 1}) for _ in range(3)} == {"a"}


def test_an_address_leaves_what_it_says_behind() -> None:
    arrived = pickle.loads(pickle.dumps(Address(Places(), Wanted(keys=(KEYS[0],)), "a")))
    assert (arrived.wanted, arrived.only) == (Wanted(), None)
