"""The threads of the model give their cores away while they wait, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from roost.errors import ConfigError
from roost.startup import THREADS_MAX, check_threads

SHOW = "import roost, os; print(os.environ.get('GOMP_SPINCOUNT'))"


def shown(code: str, **told: str) -> str:
    """What a new process prints, in an environment that says nothing of threads but this."""
    said = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    env = {name: value for name, value in os.environ.items() if name not in said} | told
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_threads_spin_for_a_moment_only_from_the_first_import_on() -> None:
    assert shown(SHOW) == "3000"


@pytest.mark.parametrize(
    "module", ["roost.library.llm", "roost.server.worker", "roost.cli.train_draft", "roost.startup"]
)
def test_it_is_said_before_torch_is_loaded(module: str) -> None:
    """Whatever is imported first: the policy is there when torch comes in."""
    watch = f"""
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            os._exit(0)
sys.meta_path.insert(0, Watch())
import {module}
"""
    assert shown(watch.replace("os._exit(0)", "sys.stdout.flush(); os._exit(0)")) == "3000"


@pytest.mark.parametrize(
    "told", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "1000"}, {"KMP_BLOCKTIME": "50"}], ids=str
)
def test_what_the_user_says_stays(told: dict[str, str]) -> None:
    assert shown(SHOW, **told) == told.get("GOMP_SPINCOUNT", "None")


def test_a_number_of_threads_that_a_system_may_not_start_is_refused() -> None:
    for known in (None, 1, THREADS_MAX):
        check_threads(known)
    for unknown in (-1, 0, THREADS_MAX + 1, 10**12):
        with pytest.raises(ConfigError, match=rf"--threads must be in \[1, {THREADS_MAX}\], got {unknown}$"):
            check_threads(unknown)
