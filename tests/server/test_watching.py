"""`roost top` and `roost pages` with a real server: they show what is there."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from roost.cli.main import main
from tests.server.conftest import StartTiny
from tests.support.server_process import Server, Stream
from tests.support.terminal import Terminal
from tests.support.tiny_folder import ENDLESS


@pytest.fixture
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_API_KEY", "friend")


@contextmanager
def conversation(server: Server) -> Iterator[None]:
    """Two sessions, the second a fork of the first."""
    body = {"text": "a b c d e f g h", "max_tokens": 20, "ignore_eos": True}
    try:
        for path, said in (("", {"id": "walk"}), ("/walk/generate", body), ("/walk/fork", {"id": "copy"})):
            answer = server.post(f"/v1/sessions{path}", said)
            assert answer.is_success, answer.text
        yield
    finally:
        server.close_sessions()


@pytest.mark.usefixtures("with_key")
def test_top_shows_sessions_rows_steps_and_pages(friendly: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with conversation(friendly):
        body = {"text": "a", "sampling_params": ENDLESS, "stream": True}
        with closing(Stream(friendly, "/generate", body, friendly.http.headers)) as stream:
            stream.next()
            assert main(["top", "--once", "--url", friendly.url]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^sessions 2 .*\n  walk +idle .*\n  └ copy +idle ", printed, re.MULTILINE)
    assert re.search(r"^running 1\n  \S+ +(prefill|decode) ", printed, re.MULTILINE)
    assert re.search(r"^last \d+ steps ", printed, re.MULTILINE) and "  ok  " in printed
    assert re.search(r"full pages of 16 .* leased [1-9]", printed) and "held most: " in printed


@pytest.mark.usefixtures("with_key")
def test_top_on_a_terminal_follows_the_server(friendly: Server) -> None:
    terminal = Terminal("top", "--url", friendly.url, term="xterm-256color", size=(50, 120))
    try:
        terminal.until("sessions 0")
        with conversation(friendly):
            terminal.until("└ copy")
        terminal.until("sessions 0")
        terminal.type("q")
        assert terminal.end() == 0 and terminal.is_as_before()
    finally:
        terminal.close()


def test_top_stays_when_the_engine_is_gone_and_says_so(start_tiny: StartTiny) -> None:
    server = start_tiny()
    terminal = Terminal("top", "--url", server.url, term="xterm-256color", size=(50, 120))
    try:
        terminal.until("  \x1b[32mok")
        os.kill(server.engine_pid, signal.SIGKILL)
        terminal.until("lost for ")
        terminal.type("q")
        assert terminal.end() == 0
    finally:
        terminal.close()


@pytest.mark.usefixtures("with_key")
def test_pages_are_all_there_and_their_sums_too(friendly: Server, capsys: pytest.CaptureFixture[str]) -> None:
    with conversation(friendly):
        assert main(["pages", "--json", "--url", friendly.url]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert main(["pages", "--url", friendly.url]) == 0
        printed = capsys.readouterr().out
    (pool,) = answer["pools"]
    counts = {kind: sum(run["count"] for run in pool["pages"] if run["kind"] == kind) for kind in ("free", "leased")}
    assert counts == {kind: pool[kind] for kind in counts} and counts["leased"] > 0
    assert sum(run["count"] for run in pool["pages"]) == pool["total"] + 1, "with the page for padding"
    assert f"full: {pool['total']} pages of {answer['page_size']} tokens: {pool['free']} free" in printed
    assert "session walk, idle" in printed


def test_without_the_key_both_say_where_to_put_it(
    friendly: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROOST_API_KEY", raising=False)
    for command in ("top", "pages"):
        assert main([command, "--url", friendly.url]) == 1
        assert "put one of its API keys into $ROOST_API_KEY" in capsys.readouterr().err
