"""Speculation's statistics add up, can be subtracted, and travel as JSON."""

import json
from dataclasses import replace

import pytest

from roost.front.speculation import as_json, from_json, since, total
from roost.messages import SpecStats

ONE = SpecStats(
    rounds=4,
    drafts_offered=12,
    drafts_accepted=6,
    drafts_forced=2,
    overshoot=1,
    lookup_rounds=2,
    lookup_offered=6,
    lookup_accepted=5,
    histogram=(1, 1, 1, 1),
)
OTHER = SpecStats(
    rounds=2,
    drafts_offered=6,
    drafts_accepted=1,
    drafts_forced=1,
    overshoot=0,
    lookup_rounds=1,
    lookup_offered=3,
    lookup_accepted=0,
    histogram=(1, 1, 0, 0),
)
BOTH = SpecStats(
    rounds=6,
    drafts_offered=18,
    drafts_accepted=7,
    drafts_forced=3,
    overshoot=1,
    lookup_rounds=3,
    lookup_offered=9,
    lookup_accepted=5,
    histogram=(2, 2, 1, 1),
)


def test_a_total_is_the_sum_of_every_number() -> None:
    assert total([ONE, OTHER]) == total([OTHER, ONE]) == total([ONE, SpecStats(), OTHER]) == BOTH
    assert total([]) == SpecStats()


def test_what_was_added_between_two_readings_is_what_the_requests_between_them_had() -> None:
    assert since(ONE, BOTH) == OTHER and since(SpecStats(), ONE) == ONE
    assert since(ONE, ONE) == SpecStats(histogram=(0, 0, 0, 0))


def test_the_accept_length_counts_the_bonus_and_is_the_mean_of_the_histogram() -> None:
    for spec in (ONE, OTHER, BOTH):
        by_len = sum(accept_len * count for accept_len, count in enumerate(spec.histogram, 1))
        assert spec.accept_length == pytest.approx(by_len / spec.rounds)
    assert (ONE.accept_length, SpecStats().accept_length) == (2.5, 0.0)


def test_what_was_written_as_json_is_read_again() -> None:
    for spec in (ONE, OTHER, SpecStats()):
        written = json.loads(json.dumps(as_json(spec)))
        assert from_json(written) == spec and written["accept_length"] == spec.accept_length


def test_a_server_that_says_nothing_of_lookup_looked_nothing_up() -> None:
    written = {name: value for name, value in as_json(ONE).items() if not name.startswith("lookup_")}
    assert from_json(written) == replace(ONE, lookup_rounds=0, lookup_offered=0, lookup_accepted=0)
