"""The wheel in an environment of its own, away from the sources: the package is imported from there and is whole."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import roost
from tests.install.resolve import ROOT

pytestmark = pytest.mark.full
DATA = (".html", ".css", ".js", ".svg", ".safetensors", ".json", ".typed")


@pytest.fixture(scope="module")
def environment(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which finds the packages that it needs where these tests find them."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # a folder in a .pth file is searched last, and its own .pth files, an editable Roost's among them, are not read
    (packages / "shared.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--ignore-installed", str(built)], check=True)
    return folder


def run(environment: Path, program: str, *args: str) -> str:
    """What a program of that environment prints, outside of the sources."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(environment / "bin" / program), *args]
    ran = subprocess.run(command, cwd=environment, env=own, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_wheel_has_the_head_and_every_file_that_pages_are_made_of(built: Path) -> None:
    wanted = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*") if path.suffix in DATA}
    held = set(zipfile.ZipFile(built).namelist())
    assert wanted - held == set() and any(Path(name).match("roost/heads/*/model.safetensors") for name in held)


def test_the_package_is_imported_from_the_environment(environment: Path) -> None:
    place, version = run(environment, "python", "-c", "import roost; print(roost.__file__, roost.__version__)").split()
    assert Path(place).is_relative_to(environment) and version == roost.__version__


def test_the_doctor_finds_nothing_wrong_with_it(environment: Path) -> None:
    said = json.loads(run(environment, "roost", "doctor", "--no-self-test", "--json"))
    assert said["ok"] and said["sections"]["versions"]["roost"] == roost.__version__
    assert said["sections"]["model cache"]["draft_head"] == "installed"
    assert "no problems found" in run(environment, "roost", "doctor", "--no-self-test")


def test_every_command_has_its_help(environment: Path) -> None:
    assert "--port" in run(environment, "roost", "serve", "--help")
    assert run(environment, "roost", "--version") == f"roost {roost.__version__}\n"
