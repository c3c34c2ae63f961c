"""One definition of a sampling parameter is enough: every interface has it then, down to the sampler's row."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.planted.apply import ROOT
from tests.unit.sampling.made_up import DEFAULT, GIVEN, HELP, NAME


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.sampling.made_up"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_every_interface_takes_a_parameter_that_was_only_defined(found: dict[str, Any]) -> None:
    assert found["default"] == DEFAULT
    assert found["options"] == dict.fromkeys(("library", "openai", "sglang", "command line"), GIVEN)
    assert "--made-up X" in found["help"] and f"{HELP} (default: {DEFAULT})" in found["help"]
    assert found["remote"] == {NAME: GIVEN}, "what `roost chat --url` sends"
    assert found["docs"] == [
        f"| `{NAME}` | {DEFAULT} | a finite number in [0, {GIVEN}] | `{NAME}` | `{NAME}` | `--made-up` | {HELP} |"
    ]


def test_it_travels_to_the_row_of_the_sampler(found: dict[str, Any]) -> None:
    assert found["wire"] == GIVEN
    assert found["row"] == [0.0, GIVEN]


def test_values_of_another_type_or_out_of_its_range_are_refused_by_its_name(found: dict[str, Any]) -> None:
    assert found["refused"]["range"] == [NAME, f"must be a finite number in [0, {GIVEN}], not 0.75"]
    assert found["refused"]["type"] == [NAME, "must be a number, got 'much'"]
    assert found["refused"]["good"] == []
    assert found["path"] == f"sampling_params.{NAME}", "as a client of /generate knows it"
