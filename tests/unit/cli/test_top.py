"""`roost top` and `roost pages` as somebody at a terminal sees them, with a made-up server."""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from roost.cli import http_client
from roost.cli.main import main
from tests.support.terminal import Terminal
from tests.support.watched_frames import KEY, PAGES, FrameServer, change, session, watched, whole

SHOWN, CLEARED = "\x1b[?1049h", "\x1b[?1049l"  # the alternate screen, and the one from before
CURSOR = "\x1b[?25h"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOST_API_KEY", KEY)


@pytest.fixture
def server() -> Iterator[FrameServer]:
    with watched() as found:
        yield found


@pytest.fixture
def terminal(server: FrameServer) -> Iterator[Terminal]:
    found = Terminal("top", "--url", server.url, term="xterm-256color", size=(40, 100))
    found.until(SHOWN)
    found.until("tiny-model")
    found.until("12 pages are not free")
    yield found
    found.close()


def check_left(terminal: Terminal) -> None:
    """It has ended and left the terminal as it was."""
    assert terminal.is_as_before()
    assert terminal.screen.endswith(CLEARED) and CURSOR in terminal.screen and "Traceback" not in terminal.screen


# --- at a terminal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["q", "Q", "\x03", "\x1b[A\x1aq"], ids=["q", "shift-q", "ctrl-c", "after-other-keys"])
def test_a_key_ends_it_and_leaves_the_terminal_as_it_was(terminal: Terminal, key: str) -> None:
    assert not terminal.is_as_before(), "keys are read one by one"
    terminal.type(key)
    assert terminal.end() == 0
    check_left(terminal)


def test_a_signal_leaves_the_terminal_as_it_was_too(terminal: Terminal) -> None:
    os.kill(terminal.process.pid, signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
    check_left(terminal)


def test_what_changes_is_drawn(server: FrameServer, terminal: Terminal) -> None:
    server.send(change(sessions=[session("newcomer")]))
    terminal.until("newcomer")
    server.send(change(health="stalled", sessions_gone=["newcomer"]))
    terminal.until("stalled")
    terminal.type("q")
    assert terminal.end() == 0


def test_another_size_is_another_picture(server: FrameServer, terminal: Terminal) -> None:
    server.first = whole(sessions=[session(f"s{number}") for number in range(100)])
    server.send(server.first)
    terminal.until(" more")
    terminal.resize(200, 60)
    terminal.until("s99")
    terminal.type("q")
    assert terminal.end() == 0


def test_it_says_that_the_server_is_gone_and_comes_back_with_it(server: FrameServer, terminal: Terminal) -> None:
    server.close()
    terminal.until("lost for ")
    with watched(server.port) as again:
        again.first = whole(model="another-model")
        terminal.until("another-model")
        terminal.type("q")
        assert terminal.end() == 0
    check_left(terminal)


def test_a_server_that_comes_back_with_other_keys_ends_it(server: FrameServer, terminal: Terminal) -> None:
    server.close()
    terminal.until("lost for ")
    with watched(server.port, status=401):
        assert terminal.end() == 1
    assert CLEARED in terminal.screen and "put one of its API keys into $ROOST_API_KEY" in terminal.screen


def test_ids_of_others_control_no_terminal(server: FrameServer, terminal: Terminal) -> None:
    server.send(change(sessions=[session("evil\x1b]0;title\x07\x1b[2J")], queue=[]))
    terminal.until("evil\\x1b")
    terminal.type("q")
    assert terminal.end() == 0
    assert "\x1b]0;" not in terminal.screen and "\x1b[2J" not in terminal.screen


def test_a_terminal_that_cannot_move_its_cursor_gets_one_picture(server: FrameServer) -> None:
    terminal = Terminal("top", "--url", server.url, term="dumb")
    try:
        assert terminal.end() == 0
        assert "tiny-model" in terminal.screen and "\x1b" not in terminal.screen
    finally:
        terminal.close()


# --- without one -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [[], ["--once"]])
def test_one_picture_is_printed_as_plain_text(
    flags: list[str], server: FrameServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--url", server.url, *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("roost 0.1  tiny-model  ok  http://127.0.0.1:")
    assert "\x1b" not in printed and all(line == line.rstrip() for line in printed.splitlines())
    assert "walk" in printed and "12 pages are not free" in printed


def test_a_server_that_loads_is_said_to(server: FrameServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.first = {"whole": False, "health": "loading"}
    assert main(["top", "--once", "--url", server.url]) == 0
    assert capsys.readouterr().out.startswith("roost  loading  http://")


def test_an_engine_in_a_long_step_is_waited_for_a_little(
    server: FrameServer, capsys: pytest.CaptureFixture[str]
) -> None:
    stalled = {"whole": False, "health": "stalled"}
    for frames, said in (([stalled] * 4 + [whole()], "tiny-model  ok"), ([stalled] * 5 + [whole()], "roost  stalled")):
        server.first, *server.next = frames
        assert main(["top", "--once", "--url", server.url]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize("first", [change(health=""), None])
def test_a_stream_without_frames_is_said_to_have_ended(
    first: Any, server: FrameServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.first, server.next = first, [None]
    assert main(["top", "--once", "--url", server.url]) == 1
    assert "the stream has ended: the server stops, or its engine is gone" in capsys.readouterr().err


def test_pages_are_a_table_with_sums(server: FrameServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pages", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in printed.splitlines() if "│" in line]
    assert cells == [
        ["full", "0", "1", "padding", ""],
        ["full", "1-8", "8", "leased", "session [bold]walk (idle)"],
        ["full", "9-13", "5", "cached", "cached prefix, \\x1b[2J64 tokens"],
        ["full", "14-63", "50", "free", ""],
    ]
    assert printed.endswith("\nfull: 63 pages of 16 tokens: 50 free, 8 leased, 5 cached, 0 retiring\n")


def test_pages_as_json_are_as_the_server_says(server: FrameServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pages", "--json", "--url", server.url]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == PAGES and "\x1b" not in printed


# --- what goes wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["top", "pages"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"status": 401}, "the server asks for a key: put one of its API keys into $ROOST_API_KEY (no \\x1b[2J)"),
        ({"status": 403}, "the server refuses: no"),
        ({"status": 404}, "it is no Roost server, or too old"),
        ({"status": 503}, "the server cannot do it now: no"),
        ({"is_roost": False}, "it is no Roost server, or too old"),
    ],
)
def test_what_cannot_be_shown_says_what_to_do(
    command: str, options: dict[str, int], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with watched(**options) as server:
        assert main([command, "--url", server.url]) == 1
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1 and "\x1b" not in printed


@pytest.mark.parametrize("command", ["top", "pages"])
def test_without_a_server_it_says_how_to_start_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--url", NOWHERE]) == 1
    assert "cannot reach 127.0.0.1:9" in (said := capsys.readouterr().err) and "`roost serve` starts one" in said
    assert main([command, "--url", "ftp://x"]) == 2


def test_frames_of_another_version_end_it_with_a_message(
    server: FrameServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.first = {"whole": True, "health": "ok", "pools": {}}
    assert main(["top", "--url", server.url]) == 1
    assert "not as this version reads them" in capsys.readouterr().err


def test_pages_of_another_version_can_still_be_printed_as_they_are(
    server: FrameServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAGES, "pools", [{"name": "full"}])
    assert main(["pages", "--url", server.url]) == 1
    assert "--json prints it as it is" in capsys.readouterr().err
    assert main(["pages", "--url", server.url, "--json"]) == 0


def test_a_stream_that_falls_silent_is_lost(
    server: FrameServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_SILENCE_S", 0.2)
    server.first = change(health="stalled")
    assert main(["top", "--url", server.url]) == 1
    assert "cannot reach" in capsys.readouterr().err
