"""Resolve: what pip would install for a Python from the plain index, whatever lies on this machine.

Wheels and further indexes that the user's pip is told of are left out; the index itself and how it is reached stay.
Only metadata is read, a few megabytes: a pip that can do so is fetched first. Without any package of the project's.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIP = "pip>=26,<27"  # the dry run of old ones fetches whole wheels, gigabytes of them
KEPT = ("index-url", "cert", "client-cert", "proxy", "trusted-host", "default-timeout", "timeout")

Ran = subprocess.CompletedProcess[str]


def fetch_pip(folder: Path) -> None:
    """Put a pip of its own into a folder."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), PIP]
    subprocess.run(command, env=plain_environment(), check=True)


def resolve(folder: Path, python: str, extra: str, *options: str) -> Ran:
    """Ask the pip of that folder what it would install for an extra of the project on a version of Python."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--use-feature=fast-deps"]
    command += [
        "--python-version",
        python,
        "--only-binary=:all:",
        "--target",
        str(folder / "none"),
        f"{ROOT}[{extra}]",
        *options,
    ]
    environment = plain_environment() | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def plain_environment() -> dict[str, str]:
    """This environment, with pip told of its index and of nothing else."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    kept = {}
    for line in sorted(listed.stdout.splitlines(), reverse=True):  # the environment's, ':env:', last: they win
        name, _, value = line.partition("=")
        if (option := name.rpartition(".")[2]) in KEPT:
            kept[f"PIP_{option.replace('-', '_').upper()}"] = shlex.split(value)[0]
    return others | kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
