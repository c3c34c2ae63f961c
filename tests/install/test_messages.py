"""What a message says to install can be installed: Roost itself is in no package index."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib

import pytest

from roost.cli import serve
from tests.install.resolve import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_a_server_without_its_packages_says_which_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from roost.cli.main import main; sys.exit(main(['serve']))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    (said,) = ran.stderr.splitlines()
    assert said.startswith("roost serve: error: the package uvicorn is missing: pip install '")
    named = {re.split("[<>=]", each)[0] for each in re.findall("'(.*?)'", said)}
    assert named == {re.split("[<>=]", each)[0] for each in PROJECT["optional-dependencies"]["server"]}


def test_where_roost_is_not_installed_its_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(serve, "requires", missing)
    assert serve._packages("server") == "'.[server]' in Roost's folder"


def test_nothing_says_to_install_roost_from_an_index() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert not [path for path in files if re.search(r"install\s+['\"]?roost\b(?!-)", path.read_text())]
