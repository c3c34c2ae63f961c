"""Every planted bug fails its pinned seed, and the same seed passes without it.

`make planted` searches the seeds and writes the pins. Every change tries one bug in three; `make test-full` tries all.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from tests.planted.apply import source_path
from tests.planted.bug import Bug
from tests.planted.bugs import BUGS
from tests.planted.nursery import Nursery
from tests.sim.world import run_seed

PINS = json.loads(Path(__file__).with_name("pins.json").read_text())
ONE_IN = 3


def is_drawn(bug: Bug) -> bool:
    """Whether this change tries it: which part is drawn depends on the module's source, so that changes try others."""
    source = source_path(bug.module).read_text()
    return crc32(f"{bug.name} {source}".encode()) % ONE_IN == 0


DRAWN = [pytest.param(bug, marks=[] if is_drawn(bug) else pytest.mark.full, id=bug.name) for bug in BUGS]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Where trials run."""
    with Nursery() as nursery:
        yield nursery


@pytest.mark.parametrize("bug", DRAWN)
def test_the_protection_is_missed_when_it_is_taken_away(bug: Bug, nursery: Nursery) -> None:
    pin = PINS[bug.name]
    assert nursery.trial(bug, pin["seed"], 1) == (pin["seed"], pin["check"])


@pytest.mark.parametrize("seed", sorted({pin["seed"] for pin in PINS.values() if pin["seed"] >= 0}))
def test_the_pinned_seeds_pass_with_every_protection_in_place(seed: int) -> None:
    assert run_seed(seed).failure == ""
