"""`python -m tests.planted.trial NAME FIRST COUNT`: run seeds with one bug planted, until one fails.

Prints the failing seed and the check that found it, or 'survived'. A bug that names a test has that run instead. A
process of its own, for the import.
"""

import re
import sys

import pytest

from tests.planted.apply import plant
from tests.planted.bugs import BUGS

_INVARIANTS = (
    ("the row has", "guard"),
    ("cannot go to", "ledger"),
    ("device length", "device length"),
    ("", "audit"),
)


def check_of(failure: str) -> str:
    """The check that a failure's message names."""
    kind, _, message = failure.partition(": ")
    named = re.match(r"([a-z ]+): ", message)
    if kind == "Broken" and named:
        return named.group(1)
    if kind == "InvariantError":
        return next(name for words, name in _INVARIANTS if words in message)
    return {"Touched": "witness", "AssertionError": "assertion"}.get(kind, "crash")


def main() -> None:
    """Plant, run, print."""
    name, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    bug = next(bug for bug in BUGS if bug.name == name)
    plant(bug)
    if bug.test:
        failed = (
            pytest.main(["-q", "-x", "--tb=no", "-p", "no:cacheprovider", bug.test]) == pytest.ExitCode.TESTS_FAILED
        )
        print("-1\ttest" if failed else "survived")
        return
    from tests.sim.world import run_seed  # noqa: PLC0415 (must come after the bug)

    for seed in range(first, first + count):
        report = run_seed(seed)
        if report.failure:
            print(f"{seed}\t{check_of(report.failure)}")
            return
    print("survived")


if __name__ == "__main__":
    main()
