"""`python -m tests.planted [NAME …]`: find a failing seed for every planted bug, and write the table and the pins.

Each bug gets up to 300 seeds, or the one test it names. The table goes to docs/PLANTED.md, the pins to
tests/planted/pins.json; a pin that stands for a test has seed -1.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.planted.apply import ROOT
from tests.planted.bug import Bug
from tests.planted.bugs import BUGS

SEEDS_MAX = 300
PINS = Path(__file__).with_name("pins.json")
TABLE = ROOT / "docs" / "PLANTED.md"


def trial(bug: Bug, first: int, count: int) -> tuple[int, str] | None:
    """(failing seed, check that found it), or None if the bug survived; seed -1 for a test that failed."""
    command = [sys.executable, "-m", "tests.planted.trial", bug.name, str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{bug.name}: the trial itself broke:\n{done.stderr}")
    last = done.stdout.strip().split("\n")[-1]
    if last == "survived":
        return None
    seed, check = last.split("\t")
    return int(seed), check


def main() -> int:
    """Search, print, write; the exit status says whether every bug was found."""
    names = sys.argv[1:]
    bugs = [bug for bug in BUGS if not names or bug.name in names]
    pins = json.loads(PINS.read_text()) if PINS.exists() else {}
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = list(pool.map(lambda bug: trial(bug, 0, SEEDS_MAX), bugs))
    for bug, result in zip(bugs, found, strict=True):
        print(f"{bug.name:32} {'SURVIVED' if result is None else f'seed {result[0]}: {result[1]}'}")
        if result is not None:
            pins[bug.name] = {"seed": result[0], "check": result[1]}
    pins = {bug.name: pins[bug.name] for bug in BUGS if bug.name in pins}
    PINS.write_text(json.dumps(pins, indent=1) + "\n")
    TABLE.write_text(table(pins))
    survived = sum(result is None for result in found)
    print(f"planted: {len(found) - survived} passed, {survived} failed")
    return 1 if survived else 0


def table(pins: dict[str, dict[str, int | str]]) -> str:
    """docs/PLANTED.md."""
    lines = [
        "# Planted bugs",
        "",
        "Written by `make planted`; do not edit. Each bug is one source line swapped as it is imported. 'Seeds' is how",
        "many simulated worlds, from seed 0 on, it took to find it, or says that a test does; 'found by' is the check",
        "that failed.",
        "",
        "| bug | module | seeds | found by | what goes wrong |",
        "|---|---|---|---|---|",
    ]
    for bug in BUGS:
        if bug.name in pins:
            pin = pins[bug.name]
            seeds = "a test" if bug.test else int(pin["seed"]) + 1
            lines.append(f"| {bug.name} | {bug.module} | {seeds} | {pin['check']} | {bug.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
