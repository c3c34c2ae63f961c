"""The lock for development pins what pyproject.toml asks for, within its ranges, and nothing bound to a machine."""

import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.install.__main__ import PYTHONS
from tests.install.lock import LEFT_OUT, LOCK, asked
from tests.install.resolve import ROOT, fetch_pip, resolve

LINES = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
PINS = {pin.name: pin for pin in map(Requirement, LINES)}


def test_the_lock_holds_one_exact_version_a_line_and_no_place_to_get_it_from() -> None:
    assert [str(pin) for pin in PINS.values()] == LINES
    assert all([each.operator for each in pin.specifier] == ["=="] and pin.url is None for pin in PINS.values())
    assert "://" not in LOCK.read_text()


def test_the_lock_satisfies_what_the_project_asks_for() -> None:
    for wish in asked():
        name = canonicalize_name(wish.name)
        if name in LEFT_OUT:
            assert name not in PINS, "a build that differs from machine to machine"
            continue
        (pin,) = PINS[name].specifier
        assert wish.specifier.contains(pin.version), f"{wish} is locked at {pin.version}: run `make lock`"


def test_nothing_is_installed_from_the_lock_unasked() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")]
    assert not [line for line in recipes if LOCK.name in line]


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
def test_the_plain_index_has_every_locked_version(python: str, tmp_path: Path) -> None:
    try:
        fetch_pip(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("no package index can be reached")
    ran = resolve(tmp_path, python, "test", "--constraint", str(LOCK))
    assert ran.returncode == 0, ran.stderr
