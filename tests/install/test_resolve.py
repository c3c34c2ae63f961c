"""What the project asks for can be had, from the plain index too, where torch's build for CUDA names its own Triton."""

import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

from tests.install.__main__ import PYTHONS
from tests.install.resolve import ROOT, fetch_pip, plain_environment, resolve

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ASKED = [asked for asked in chain(PROJECT["dependencies"], *EXTRAS.values()) if "roost" not in asked]
TORCH = {"2.11.0": "3.6.0", "2.13.0": "3.7.1"}  # builds for CUDA, and the one Triton that each takes


def publish(folder: Path, name: str, version: str, needs: str = "") -> None:
    """Put a wheel that holds nothing but its metadata into a folder."""
    stem = f"{name.replace('-', '_')}-{version}"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (
        f"Requires-Dist: {needs}\n" if needs else ""
    )
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", metadata)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")


def chosen(folder: Path, *asked: str) -> str:
    """What pip would install of a folder's wheels, and of nothing else."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-index",
        "--no-cache-dir",
    ]
    command += ["--find-links", str(folder), *asked]
    ran = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()[-1]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """Wheels of all that is asked for but torch, and Triton from before, within and after what was tried."""
    for asked in ASKED:
        name = asked.partition(">=")[0].partition("[")[0]
        if name not in ("torch", "triton"):
            publish(tmp_path, name, "9999")
    for version in ("3.5.0", "3.6.0", "3.7.1", "3.9.0", "99"):
        publish(tmp_path, "triton", version)
    return tmp_path


@pytest.mark.parametrize("torch", TORCH)
def test_a_torch_that_takes_one_triton_alone_can_be_installed_with_everything_else(torch: str, index: Path) -> None:
    publish(index, "torch", torch, f"triton=={TORCH[torch]}")
    assert {f"torch-{torch}", f"triton-{TORCH[torch]}"} <= set(chosen(index, *ASKED).split())


def test_a_torch_for_cpus_is_preferred_where_one_is_found_and_comes_without_cuda(index: Path) -> None:
    publish(index, "torch", "2.13.0", "triton==3.7.1")
    publish(index, "torch", "2.13.0+cpu")
    publish(index, "torch", "99", "triton==99")
    assert {"torch-2.13.0+cpu", "triton-3.9.0"} <= set(chosen(index, *ASKED).split()), "the newest that were tried"


def test_nothing_is_asked_for_in_one_version_alone_and_nothing_constrains_it_further() -> None:
    assert not [asked for asked in ASKED if "==" in asked.partition(";")[0]]
    assert not list(ROOT.glob("constraints*.txt"))


def test_the_plain_index_is_asked_without_what_this_machine_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///more")
    monkeypatch.setenv("PIP_INDEX_URL", "file:///mirror")
    told = {name: value for name, value in plain_environment().items() if name.startswith("PIP_")}
    assert "PIP_FIND_LINKS" not in told and "PIP_EXTRA_INDEX_URL" not in told
    assert told["PIP_INDEX_URL"] == "file:///mirror", "how the index is reached stays"


@pytest.mark.full
@pytest.mark.parametrize("python", PYTHONS)
def test_the_plain_index_has_all_that_make_test_installs(python: str, tmp_path: Path) -> None:
    try:
        fetch_pip(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("no package index can be reached")
    ran = resolve(tmp_path, python, "test")
    assert ran.returncode == 0, ran.stderr
    assert "Would install " in ran.stdout
