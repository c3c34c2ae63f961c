"""`roost chat --url` and `roost bench --url`: the command line with a running server, ours or another's."""

import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from roost.cli.main import main
from roost.cli.remote_sessions import ClientSideSession, RemoteServer, RemoteSession
from roost.errors import CapacityError, ConfigError, RequestError
from roost.front.options import Options
from tests.support.chain_model import save_chain
from tests.support.server_process import Server

SPELT = ("\n", "h", "e", "12", "!", "<|im_end|>")  # the answer to any message
FLAGS = ("--weights", "fp32", "--threads", "1", "--pool-tokens", "16384", "--page-size", "4")
USER = [{"role": "user", "content": "hi"}]
GREEDY = Options(temperature=0, max_new_tokens=6)
ENDLESS = Options(
    temperature=0,
    max_new_tokens=3000,
    min_new_tokens=2,
    ignore_eos=True,
    stop=("never",),
    logit_bias=((5, -1.0),),
    timeout_s=600.0,
)


@pytest.fixture(scope="module")
def chain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are known, and that nothing may be left in."""
    model = save_chain(tmp_path_factory.mktemp("chain"), *SPELT)
    server = Server(tmp_path_factory.mktemp("server"), "--model", str(model), "--max-sessions", "2", *FLAGS)
    try:
        yield server
        server.check_rest()
        assert server.stop() == 0
    finally:
        server.kill()


def say(monkeypatch: pytest.MonkeyPatch, url: str, *lines: str) -> int:
    """Type into a chat."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    return main(["chat", "--url", url, "--temperature", "0"])


def test_chat_with_a_server_is_a_session_of_it(
    chain_server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = ["/fork", "more", "/stats", "/fork", "/back"]
    lines = ["hello", "again", *copy, "/rewind", "/stats", "again", "/clear", "/system Be brief.", "hello"]
    assert say(monkeypatch, chain_server.url, *lines) == 0
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    assert printed.out == "he12!\n" * 5
    turns = [
        (int(a), int(b)) for a, b in re.findall(r"5 tokens, \S+ first after \S+ s; inherited (\d+) of (\d+)", said)
    ]
    assert len(turns) == 5
    assert turns[1][0] == turns[0][1] + 5, "all of the first turn, its end too"
    assert turns[3][1] == turns[1][1], "rewound, the second turn is made again"
    assert turns[4][0] == 0 and turns[4][1] > turns[0][1], "a new conversation with a system message"
    assert "3 turns, " in said and "2 sessions, " in said and "pages: " in said
    assert "2 sessions are open: --max-sessions" in said, "what the server refuses is said, and the chat goes on"
    assert "back, after 2 turns" in said and "1 turns and " in said
    chain_server.check_rest()  # it has closed its sessions


def test_an_answer_that_is_left_is_undone_in_the_server(chain_server: Server) -> None:
    session = RemoteServer(chain_server.url).session()
    assert isinstance(session, RemoteSession)
    for _ in range(2):
        pieces = session.chat(USER, ENDLESS)
        assert next(pieces).text
        pieces.close()
        state = session.state()
        assert (state.turns, state.length, state.state) == (0, 0, "idle")
    *_, last = session.chat(USER, GREEDY)
    assert last.finished is not None and last.finished.usage.completion_tokens == 5
    with session_closed(session.fork()) as fork:
        pieces = session.chat(USER, ENDLESS)
        next(pieces)
        pieces.close()
        assert session.rewind(turn=1).turns == 1 == fork.state().turns
    with pytest.raises(RequestError, match="turn: "):
        session.rewind(turn=9)
    with pytest.raises(RequestError, match="n: is not supported in a chat"):
        next(session.chat(USER, Options(n=2)))
    session.close()
    session.close()
    chain_server.check_rest()


@contextmanager
def session_closed(session: Any) -> Iterator[Any]:
    yield session
    session.close()


def test_a_level_of_a_bench_finds_nothing_of_another_in_a_servers_cache(chain_server: Server, tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("\n".join(letter * 40 for letter in "abcd"))
    flags = ["--requests", "4", "--new-tokens", "5", "--concurrency", "1,1", "--json", str(tmp_path / "out.json")]
    for _ in range(2):
        assert main(["bench", "--url", chain_server.url, "--prompts", str(tmp_path / "prompts"), *flags]) == 0
        shares = {run["cached_share"] for run in json.loads((tmp_path / "out.json").read_text())}
        assert len(shares) == 1 and 0 < shares.pop() < 0.5, "the template's beginning alone"


# --- a server that is not ours -----------------------------------------------------------------------------------


class Foreign(BaseHTTPRequestHandler):
    """OpenAI's API without sessions, salts or sums; says what it heard."""

    heard: list[dict[str, Any]]

    def do_GET(self) -> None:
        """The list of models, and nothing else."""
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": "foreign"}]})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """A streamed answer: the number of messages."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/chat/completions":
            self._answer(404, {"detail": "Not Found"})
            return
        self.heard.append(body)
        if body["messages"][-1]["content"] == "too much":
            self._answer(400, {"error": {"message": "messages: too long", "param": "messages"}})
            return
        self.send_response(200)
        self.end_headers()
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": None}
        for chunk in (
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": str(len(body["messages"]))}}]},
            {"choices": [{"delta": {"content": "!"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ):
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def foreign() -> Iterator[str]:
    """Its address."""
    Foreign.heard = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_without_sessions_is_sent_the_whole_conversation(
    foreign: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["one", "two", "/fork", "three", "/back", "too much", "/rewind", "/stats", "four", "/clear", "five"]
    assert say(monkeypatch, f"{foreign}/v1/", *lines) == 0
    printed = capsys.readouterr()
    assert printed.out == "1!\n3!\n5!\n3!\n1!\n"
    said = " ".join(printed.err.split())
    assert "foreign is ready" in said and "messages: too long" in said
    assert "1 turns, 12 tokens" in said and "reports no statistics of its engine" in said
    assert [message["content"] for message in Foreign.heard[4]["messages"]] == ["one", "1!", "four"]
    asked = {"model": "foreign", "temperature": 0, "max_tokens": 512, "stream": True}
    assert asked.items() <= Foreign.heard[0].items() and "top_k" not in Foreign.heard[0]
    assert isinstance(RemoteServer(foreign).session(), ClientSideSession)


def test_levels_of_a_bench_ask_a_foreign_server_for_other_texts(foreign: str) -> None:
    assert main(["bench", "--url", foreign, "--requests", "3", "--concurrency", "1,3"]) == 0
    texts = [body["messages"][0]["content"] for body in Foreign.heard]
    assert len(set(texts)) == 6 and not any("cache_salt" in body for body in Foreign.heard)
    plain = [re.sub(r"^\[[0-9a-f]{8}\] ", "", text) for text in texts]
    assert sorted(plain[:3]) == sorted(plain[3:]) and len(set(plain)) == 3


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://x", "--url must be like http://host:port, got ftp://x"),
        ("http://[", "--url must be like http://host:port"),
        ("http://host:x", "--url must be like http://host:port"),
        ("http://127.0.0.1:9", "--url: cannot reach 127.0.0.1:9"),
    ],
)
def test_a_server_that_cannot_be_reached_ends_the_chat_with_one_line(
    url: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say(monkeypatch, url, "hello") == 2
    assert capsys.readouterr().err.startswith(f"roost chat: error: {said}")


def test_a_key_is_shown_and_a_server_that_goes_away_ends_the_answer_with_an_error(
    start_tiny: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_tiny("--api-key", "secret")
    assert say(monkeypatch, server.url, "/stats") == 2
    assert "roost chat: error: authorization: must be" in capsys.readouterr().err
    monkeypatch.setenv("ROOST_API_KEY", "secret")
    assert say(monkeypatch, server.url, "/stats") == 0
    assert "0 turns, 0 tokens" in capsys.readouterr().err
    pieces = RemoteServer(server.url).session().chat(USER, ENDLESS)
    next(pieces)
    server.kill()
    with pytest.raises((CapacityError, ConfigError)):
        list(pieces)
