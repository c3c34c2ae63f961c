"""`python -m tests.tidy.modes`: write to docs/FAILURE_MODES.md which tests and planted bugs stand for each mode.

A test stands for the mode whose number its name begins with, a planted bug for those that its explanation begins with.
Nothing is run; everything before the table is written by hand.
"""

import re
from collections import Counter

from tests.planted.bugs import BUGS
from tests.tidy.source import ROOT, everything

PAGE = ROOT / "docs" / "FAILURE_MODES.md"
HEADING = "## Where each is tested\n"
_TEST = re.compile(r"test_(\d\d)_")
_BUG = re.compile(r"(\d+(?:, \d+)*): ")
_ENTRY = re.compile(r"^(\d+)\. \*\*", re.MULTILINE)


def described() -> list[int]:
    """The numbers of the modes on the page, in its order."""
    return [int(number) for number in _ENTRY.findall(PAGE.read_text())]


def counted() -> dict[int, Counter[str]]:
    """Of each mode with tests, how many there are in each file."""
    found: dict[int, Counter[str]] = {}
    for module in everything():
        for function in module.functions():
            if named := _TEST.match(function.name):
                found.setdefault(int(named[1]), Counter())[module.place] += 1
    return found


def planted() -> dict[int, list[str]]:
    """Of each mode with planted bugs, their names."""
    found: dict[int, list[str]] = {}
    for bug in BUGS:
        if named := _BUG.match(bug.why):
            for number in named[1].split(", "):
                found.setdefault(int(number), []).append(bug.name)
    return found


def written() -> str:
    """The page, with the table as the tests are now."""
    by_hand, heading, _ = PAGE.read_text().partition(HEADING)
    assert heading, f"{PAGE.name} has lost its heading {HEADING!r}"
    counts, bugs = counted(), planted()
    lines = [
        "Written by `make modes`; do not edit below the heading. In brackets how many tests a file has for the mode.",
        "",
        "| mode | tests | planted bugs |",
        "|---|---|---|",
    ]
    for mode in described():
        files = ", ".join(f"`{place}` ({count})" for place, count in sorted(counts.get(mode, Counter()).items()))
        lines.append(f"| {mode} | {files} | {', '.join(bugs.get(mode, []))} |")
    return "\n".join([by_hand + heading, *lines]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(written())
