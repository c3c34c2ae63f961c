"""Every program in examples/ runs: those of the library with a tiny model, those of the server with the default one."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.support.chain_model import save_chain
from tests.support.server_process import ROOT, Server

EXAMPLES = ROOT / "examples"
LINES_MAX = 60
LIBRARY = {  # and something that each must say
    "chat.py": "[128 tokens, ended by length]",
    "session.py": "fork: 3 turns\nrewound: 1 turn, ",
    "batch.py": "\n3. ",
    "logprobs.py": "tokens scored, perplexity ",
    "extract.py": "product: ",
    "speculation.py": "same text as plain decoding: True",
}
SERVER = {
    "openai_client.py": "Paris",
    "http_session.py": "\nrewound to 1 turn, ",
    "calculator_agent.py": "calculate(17 plus 25) = 42\n",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that writes token after token."""
    return save_chain(tmp_path_factory.mktemp("chain"), "a", "b")


def _said(name: str, *args: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_small_and_run_below() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(lines) == set(LIBRARY | SERVER)
    assert {name: number for name, number in lines.items() if number > LINES_MAX} == {}


@pytest.mark.parametrize("name", LIBRARY)
def test_an_example_of_the_library_runs(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _said(name, "--model", str(model), monkeypatch=monkeypatch, capsys=capsys)
    assert LIBRARY[name] in said


@pytest.mark.parametrize("name", SERVER)
def test_an_example_of_the_server_runs_and_leaves_nothing_behind(
    name: str, rested: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _said(name, "--url", rested.url, monkeypatch=monkeypatch, capsys=capsys)
    assert SERVER[name] in said
