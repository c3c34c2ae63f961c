"""Every planted bug fails its pinned seed, and the same seed passes without it.

`make planted` searches the seeds and writes the pins.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted.bug import Bug
from tests.planted.bugs import BUGS
from tests.planted.nursery import Nursery
from tests.sim.world import run_seed

PINS = json.loads(Path(__file__).with_name("pins.json").read_text())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Where trials run."""
    with Nursery() as nursery:
        yield nursery


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_protection_is_missed_when_it_is_taken_away(bug: Bug, nursery: Nursery) -> None:
    pin = PINS[bug.name]
    assert nursery.trial(bug, pin["seed"], 1) == (pin["seed"], pin["check"])


@pytest.mark.parametrize("seed", sorted({pin["seed"] for pin in PINS.values() if pin["seed"] >= 0}))
def test_the_pinned_seeds_pass_with_every_protection_in_place(seed: int) -> None:
    assert run_seed(seed).failure == ""
