"""A bar shows what is fetched, and nothing else."""

import io
import sys
from pathlib import Path

import pytest

from roost.cli.main import main
from roost.terminal import download_bar
from tests.support.chain_model import save_chain


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)  # within a test: the capture takes it over between fixtures and tests
    return terminal


def test_a_bar_appears_with_the_first_bytes_that_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with download_bar() as progress:
        assert terminal.getvalue() == "", "nothing is fetched yet"
        progress(500_000, 2_000_000)
        progress(2_000_000, 2_000_000)
    assert "fetching" in terminal.getvalue() and "2.0/2.0 MB" in terminal.getvalue()


def test_no_bar_is_drawn_on_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with download_bar() as progress:
        progress(1, 2)
    assert sys.stderr.getvalue() == ""


def test_no_bar_is_drawn_where_a_model_is_read_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = on_terminal(monkeypatch)
    folder = save_chain(tmp_path, "a", "b", "<|im_end|>")
    assert main(["generate", "a", "--model", str(folder), "--threads", "1", "--pool-tokens", "2048"]) == 0
    assert capsys.readouterr().out == "b\n"
    assert terminal.getvalue() == ""
