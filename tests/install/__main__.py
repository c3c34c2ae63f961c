"""`python -m tests.install`: would what the README names install on a bare machine? Nothing is installed."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.install.resolve import fetch_pip, resolve

COMMANDS = {"make serve": "server", "make test": "test"}  # and the extra that each installs
PYTHONS = ("3.11", "3.12")


def main() -> int:
    """Ask pip for each command and each Python; the exit status says whether all can be installed."""
    failed = 0
    with TemporaryDirectory() as folder:
        fetch_pip(Path(folder))
        for python in PYTHONS:
            for command, extra in COMMANDS.items():
                ran = resolve(Path(folder), python, extra)
                print(f"{command}, Python {python}: {(ran.stdout.strip().splitlines() or [''])[-1]}", flush=True)
                if ran.returncode:
                    print(ran.stderr, file=sys.stderr, flush=True)
                    failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
