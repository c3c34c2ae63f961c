"""The wheel that tests of the installation look at, built once of a copy of the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.install.resolve import ROOT


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's file."""
    folder = tmp_path_factory.mktemp("build")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
