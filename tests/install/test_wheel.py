"""What is built is whole: the code and its types, the draft heads, the licence, and what the server needs besides."""

import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import roost
from tests.install.resolve import ROOT


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src" / "roost"
    files = {str(path.relative_to(ROOT / "src")) for path in package.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {name for name in wheel.namelist() if name.startswith("roost/")} == wanted
    assert any(Path(name).parts[1] == "heads" for name in wanted), "the default model's head is one of them"


def test_the_wheel_has_the_version_that_the_package_says_and_its_types(wheel: zipfile.ZipFile) -> None:
    assert metadata(wheel)["Version"] == roost.__version__
    assert "roost/py.typed" in wheel.namelist()


def test_the_wheel_says_its_licence_and_holds_the_text(wheel: zipfile.ZipFile) -> None:
    said = metadata(wheel)
    assert (said["License-Expression"], said.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    text = wheel.read(name).decode()
    assert text.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"]
    assert "END OF TERMS AND CONDITIONS" in text


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("server", ("uvicorn", "starlette", "msgspec", "pyzmq", "prometheus-client")),
        ("otel", ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")),
    ],
)
def test_the_wheel_asks_for_the_packages_of_an_extra_in_it_alone(
    wheel: zipfile.ZipFile, extra: str, packages: tuple[str, ...]
) -> None:
    asked = metadata(wheel).get_all("Requires-Dist", [])
    assert any(name.startswith("torch") and "extra ==" not in name for name in asked)
    for package in packages:
        found = [name for name in asked if name.startswith(package)]
        assert found and all(f'extra == "{extra}"' in name for name in found)
