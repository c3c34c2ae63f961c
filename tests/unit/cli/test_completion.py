"""Completion: what a shell offers is what the parsers accept, tried in bash itself."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from roost.cli.commands import COMMANDS
from roost.cli.completion import flags_of_commands
from roost.cli.main import main
from roost.config.options import DEVICES

SHELLS = ("bash", "zsh", "fish")


def script_of(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints."""
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.fixture
def bash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    """A file with the script of bash."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    path = tmp_path / "roost.bash"
    path.write_text(script_of("bash", capsys))
    return path


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words, after `roost`."""
    typed = ["roost", *words]
    asked = f"source {shlex.quote(str(script))}; COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(words)}; _roost"
    told = asked + '; printf "%s\\n" "${COMPREPLY[@]}"'
    found = subprocess.run(["bash", "--norc", "-uc", told], capture_output=True, text=True, check=True, timeout=60)
    assert found.stderr == ""
    return found.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([""], [*COMMANDS]),
        (["tr"], ["train-draft"]),
        (["--v"], ["--version"]),
        (["serve", "--page"], ["--page-size"]),
        (["serve", "--no-gr"], ["--no-graphs"]),
        (["serve", "--device", ""], list(DEVICES)),
        (["serve", "--device", "cu"], ["cuda"]),
        (["serve", "--device", "="], list(DEVICES)),
        (["serve", "--device", "=", "cp"], ["cpu"]),
        (["serve", "--port", "9", "--log-format", "j"], ["json"]),
        (["serve", "--model", ""], []),  # bash offers files
        (["serve", "--port", "--"], []),  # a value is awaited
        (["chat", "--port"], []),
        (["completion", ""], list(SHELLS)),
    ],
)
def test_bash_offers_what_may_come_next(bash: Path, words: list[str], expected: list[str]) -> None:
    assert offered(bash, *words) == expected


def test_bash_offers_every_flag_of_every_command(bash: Path) -> None:
    for command, flags in flags_of_commands().items():
        names = [name for flag in flags for name in flag.names]
        assert "--help" in names
        assert offered(bash, command, "-") == names


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_are_told_of_every_flag_and_value(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = script_of(shell, capsys)
    for command, flags in flags_of_commands().items():
        assert command in script
        for name in (name for flag in flags for name in flag.names if name.startswith("--")):
            assert (f"*{name}[" if shell == "zsh" else f" -l {name[2:]} ") in script
        for flag in flags:
            assert " ".join(flag.choices) in script


def test_zsh_has_balanced_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    for line in script_of("zsh", capsys).splitlines():
        if line.lstrip().startswith("'"):
            assert shlex.split(line.rstrip("\\;"))


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["completion", "csh"])
    assert "invalid choice: 'csh'" in capsys.readouterr().err
