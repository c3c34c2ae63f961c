"""Sessions over HTTP, REST and OpenAI's endpoints, against a real server with the real default model."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import openai
import pytest

from tests.server.test_ends import in_background
from tests.server.test_native import COUNT, ids_of
from tests.support.server_process import Server, Stream, wait_until

SHORT = {"temperature": 0, "max_tokens": 4}
ENDLESS = {"temperature": 0, "max_tokens": 1500, "ignore_eos": True}
USER = {"role": "user", "content": "Say hello."}
MORE = {"role": "user", "content": "Now say <|im_end|> goodbye."}


class Client:
    """One session of a server."""

    def __init__(self, server: Server, opened: httpx.Response | None = None, **options: Any) -> None:
        self.server = server
        opened = opened if opened is not None else server.post("/v1/sessions", options)
        assert opened.status_code == 201, opened.text
        self.id = opened.json()["id"]
        self.path = f"/v1/sessions/{self.id}"

    def ask(self, what: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """POST something to the session."""
        return self.server.post(f"{self.path}/{what}", body or {})

    def do(self, what: str, body: dict[str, Any] | None = None) -> Any:
        """The same, which must work."""
        answer = self.ask(what, body)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def state(self) -> Any:
        """How it stands."""
        return self.server.http.get(self.path).json()

    def close(self) -> httpx.Response:
        """Close it."""
        return self.server.http.delete(self.path)


@pytest.fixture
def session(rested: Server) -> Iterator[Client]:
    """A session that is closed in the end, after which nothing is left of it."""
    yield Client(rested)
    for each in rested.http.get("/v1/sessions").json()["data"]:  # also those that a failing test left
        rested.http.delete(f"/v1/sessions/{each['id']}")


def error(answer: httpx.Response) -> tuple[int, str]:
    """Status and parameter of a refusal."""
    return answer.status_code, answer.json()["error"]["param"]


def inherited(answer: Any) -> int:
    """Tokens that a turn found in place."""
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_session_from_its_opening_to_its_end(rested: Server) -> None:
    name = f"walk-{uuid4().hex}"
    session = Client(rested, id=name, ttl_s=600, max_tokens=500, salt="walk")
    assert error(rested.post("/v1/sessions", {"id": name})) == (409, "id")
    empty = session.state()
    assert {key: empty[key] for key in ("id", "length", "resident", "turns", "state", "salt")} == {
        **{"id": name, "length": 0, "resident": 0, "turns": 0, "state": "idle", "salt": "walk"}
    }
    assert empty["limits"] == {"ttl_s": 600, "max_tokens": 500}
    ids = ids_of(rested, COUNT)
    appended = session.do("append", {"text": COUNT})
    assert appended["usage"]["prompt_tokens"] == len(ids) and appended["usage"]["completion_tokens"] == 0
    assert appended["session"]["length"] == len(ids) and appended["session"]["turns"] == 1
    turn = session.do("generate", {"input_ids": ids[:3], **SHORT, "logprobs": 2})
    assert inherited(turn) == len(ids)
    assert len(turn["output_ids"]) == len(turn["logprobs"]) == 4 and turn["finish_reason"] == "length"
    length = len(ids) + 3 + 4
    assert turn["session"] == {**session.state(), "idle_s": turn["session"]["idle_s"]}
    assert (turn["session"]["length"], turn["session"]["turns"]) == (length, 2)
    assert [each["id"] for each in rested.http.get("/v1/sessions").json()["data"]] == [name]
    text = rested.http.get("/metrics").text
    assert "roost_sessions 1.0" in text and "roost_sessions_resident 1.0" in text
    assert f"roost_session_tokens {float(session.state()['resident'])}" in text
    assert session.close().json()["deleted"]
    assert (
        error(session.close())
        == error(rested.http.get(session.path))
        == error(session.ask("generate"))
        == (*(404, "session_id"),)
    )
    stats = rested.stats()
    assert stats["sessions_opened"] == stats["sessions_closed"] + stats["sessions_expired"]


def test_a_chat_in_a_session_is_as_long_as_the_chat_sent_whole(session: Client, client: openai.OpenAI) -> None:
    whole: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    answers: list[Any] = []
    for turn in range(2):
        new = whole if turn == 0 else whole[-1:]
        sent = {"model": "default", "temperature": 0, "max_tokens": 12}
        told = client.chat.completions.create(messages=new, extra_body={"session_id": session.id, "turn": turn}, **sent)
        plain = client.chat.completions.create(messages=whole, **sent)
        answers.append(told)
        assert told.usage and plain.usage and told.usage.prompt_tokens == plain.usage.prompt_tokens
        whole += [{"role": "assistant", "content": told.choices[0].message.content}, MORE]
    assert answers[1].usage.prompt_tokens_details.cached_tokens == answers[0].usage.total_tokens
    session.do("append", {"messages": [MORE]})
    appended = session.do("generate", SHORT)
    assert inherited(appended) > 0 and appended["text"]


def test_text_completions_go_on_from_a_session(session: Client, client: openai.OpenAI) -> None:
    plain = client.completions.create(model="default", prompt="One, two, three, four,", temperature=0, max_tokens=4)
    body = {"session_id": session.id}
    client.completions.create(model="default", prompt="One, two,", max_tokens=0, extra_body=body)
    stream = client.completions.create(
        model="default", prompt=" three, four,", temperature=0, max_tokens=4, extra_body=body, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text
    assert session.state()["turns"] == 2


def test_a_stream_says_the_same_in_pieces_and_ends_with_the_state(session: Client) -> None:
    whole = session.do("generate", {"text": COUNT, **SHORT})
    session.do("rewind", {"length": 0})
    events = Stream(session.server, f"{session.path}/generate", {"text": COUNT, **SHORT, "stream": True}).rest()
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    assert events[-1]["finish_reason"] == "length" and events[-1]["session"]["turns"] == 1
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)


def test_18_a_client_that_leaves_and_comes_back_at_once_goes_on_from_before(session: Client) -> None:
    session.do("generate", {"messages": [USER], **SHORT})
    before = session.state()
    told = session.do("generate", {"messages": [MORE], **SHORT})
    session.do("rewind", {"turn": 1})
    for left in ({"messages": [MORE]}, {"text": "something else"}) * 2:
        stream = Stream(session.server, f"{session.path}/generate", {**left, **ENDLESS, "stream": True})
        stream.next()
        stream.close()
        again = session.do("generate", {"messages": [MORE], **SHORT})
        assert again["usage"]["prompt_tokens"] == told["usage"]["prompt_tokens"], "nothing that nobody saw is in it"
        state = session.do("rewind", {"turn": 1})
        assert (state["length"], state["turns"]) == (before["length"], before["turns"])


def test_a_turn_sent_twice_is_made_once(session: Client) -> None:
    first = session.do("generate", {"text": COUNT, "turn": 0, **SHORT})
    again = session.ask("generate", {"text": COUNT, "turn": 0, **SHORT})
    assert error(again) == (409, "turn")
    assert again.json()["usage"] == first["usage"]
    streamed = session.ask("generate", {"text": COUNT, "turn": 0, **SHORT, "stream": True})
    assert streamed.status_code == 409 and streamed.json()["usage"] == first["usage"]
    assert session.ask("append", {"text": "x", "turn": 0}).json()["usage"] == first["usage"]
    ahead = session.ask("generate", {"text": COUNT, "turn": 2, **SHORT})
    assert error(ahead) == (409, "turn") and "is 1" in ahead.json()["error"]["message"]
    assert session.state()["turns"] == 1
    session.do("append", {"text": "x", "turn": 1})


def test_a_busy_session_refuses_or_lets_wait_and_says_so(session: Client) -> None:
    running = Stream(session.server, f"{session.path}/generate", {"text": COUNT, **ENDLESS, "stream": True})
    running.next()
    assert session.state()["state"] == "running"
    for what, body in (("generate", SHORT), ("append", {"messages": [USER]}), ("rewind", {"turn": 0}), ("fork", {})):
        assert error(session.ask(what, body)) == (409, "session_id"), what
    assert running.next()["finish_reason"] is None, "who was refused has not disturbed it"
    waiting = in_background(lambda: session.ask("generate", {"text": " six,", "queue": True, **SHORT}))
    running.close()
    answer = waiting()
    assert answer.status_code == 200 and answer.json()["session"]["turns"] == 1
    assert answer.json()["usage"]["prompt_tokens"] < 10, "what ran before was undone"


def test_waiting_turns_come_in_order_each_after_the_one_before(session: Client) -> None:
    running = Stream(
        session.server, f"{session.path}/generate", {"messages": [USER], **ENDLESS, "max_tokens": 60, "stream": True}
    )
    running.next()
    waiting = in_background(lambda: session.ask("generate", {"messages": [MORE], "queue": True, "turn": 1, **SHORT}))
    last = running.rest()[-1]
    assert last["finish_reason"] == "length"
    answer = waiting().json()
    assert inherited(answer) == last["usage"]["total_tokens"]
    assert answer["session"]["turns"] == 2


def test_closing_a_session_ends_its_turn(session: Client) -> None:
    running = Stream(session.server, f"{session.path}/generate", {"text": COUNT, **ENDLESS, "stream": True})
    running.next()
    waiting = in_background(lambda: session.ask("generate", {"text": "x", "queue": True, **SHORT}))
    assert session.close().status_code == 200
    assert running.rest()[-1]["finish_reason"] == "abort"
    assert waiting().status_code in (404, 410)
    assert session.server.http.get(session.path).status_code == 404


def test_a_turn_that_is_too_long_is_refused_and_the_session_lives_on(rested: Server) -> None:
    session = Client(rested, max_tokens=40)
    session.do("append", {"text": COUNT})
    before = session.state()
    for body in ({"text": COUNT * 10, **SHORT}, {"input_ids": [9] * 3000, **SHORT}, {"text": "x", "max_tokens": 1000}):
        answer = session.ask("generate", body)
        assert answer.status_code == 413 and "maximum allowed length" in answer.json()["error"]["message"]
    assert {**session.state(), "idle_s": 0} == {**before, "idle_s": 0}
    assert inherited(session.do("generate", {"text": " five,", **SHORT})) == before["length"]
    session.close()


def test_rewind_and_fork_over_http(session: Client) -> None:
    one = session.do("generate", {"messages": [USER], **SHORT})
    two = session.do("generate", {"messages": [MORE], **SHORT})
    copy = Client(session.server, session.ask("fork"))
    back = session.do("rewind", {"turn": 1})
    assert (back["length"], back["turns"]) == (one["session"]["length"], 1)
    again = session.do("generate", {"messages": [MORE], **SHORT})
    assert again["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]
    assert one["session"]["length"] - inherited(again) < 16, "at most a page is run again: the fork shares whole ones"
    assert copy.state()["length"] == two["session"]["length"]
    assert copy.do("generate", {"messages": [USER], **SHORT})["session"]["turns"] == 3
    assert error(session.ask("fork", {"id": copy.id})) == (409, "id")
    copy.close()
    for body, param in (
        ({}, "turn"),
        ({"turn": 1, "length": 1}, "turn"),
        ({"turn": 9}, "turn"),
        ({"length": 9999}, "length"),
    ):
        assert error(session.ask("rewind", body)) == (400, param)
    middle = session.do("rewind", {"length": one["session"]["length"] - 2})
    assert middle["turns"] == 0
    assert error(session.ask("generate", {"messages": [MORE], **SHORT})) == (400, "messages")
    session.do("generate", {"text": "x", **SHORT})


def test_looking_changes_nothing(session: Client) -> None:
    session.do("append", {"text": COUNT})
    before = session.state()
    for _ in range(3):
        session.server.http.get("/v1/sessions")
        session.server.http.get("/metrics")
        session.server.http.get(f"{session.path}/fork")
        session.server.http.get(f"{session.path}/generate")
        after = session.state()
        assert {**after, "idle_s": 0} == {**before, "idle_s": 0} and after["idle_s"] >= before["idle_s"]


BAD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("append", {}, "text"),
    ("append", {"text": "a", "messages": [USER]}, "messages"),
    ("append", {"text": "a", "input_ids": [1]}, "input_ids"),
    ("append", {"input_ids": [[1]]}, "input_ids"),
    ("append", {"input_ids": [10**9]}, "input_ids"),
    ("append", {"text": ""}, "text"),
    ("append", {"messages": []}, "messages"),
    ("append", {"text": "a", "temperature": 0}, "temperature"),
    ("append", {"text": "a", "turn": -1}, "turn"),
    ("generate", {}, "text"),
    ("generate", {"text": "a", "n": 2}, "n"),
    ("generate", {"text": "a", "top_p": 2}, "top_p"),
    ("generate", {"text": "a", "max_tokens": -1}, "max_tokens"),
    ("generate", {"text": "a", "cache_salt": "other"}, "cache_salt"),
    ("generate", {"text": "a", "session_id": "x"}, "session_id"),
    ("generate", {"text": "a", "stream_options": {}}, "stream_options"),
    ("generate", {"text": "a", "logprobs": 1000}, "logprobs"),
    ("fork", {"id": "a/b"}, "id"),
)


def test_what_cannot_be_done_is_refused_by_name_and_leaves_no_trace(session: Client) -> None:
    wrong = [(what, body) for what, body, param in BAD if error(session.ask(what, body)) != (400, param)]
    assert wrong == []
    assert (session.state()["length"], session.state()["turns"], session.state()["state"]) == (0, 0, "idle")


def test_openai_endpoints_refuse_what_a_session_cannot_do(session: Client) -> None:
    chat, text = {"messages": [USER], "session_id": session.id}, {"prompt": "a", "session_id": session.id}
    cases = (
        ("/v1/chat/completions", {**chat, "n": 2}, 400, "n"),
        ("/v1/chat/completions", {**chat, "session_id": "nobody"}, 404, "session_id"),
        ("/v1/chat/completions", {"messages": [USER], "turn": 0}, 400, "turn"),
        ("/v1/chat/completions", {"messages": [USER], "queue": True}, 400, "queue"),
        ("/v1/completions", {**text, "prompt": ["a", "b"]}, 400, "prompt"),
        ("/v1/completions", {**text, "echo": True}, 400, "echo"),
    )
    for path, body, status, param in cases:
        assert error(session.server.post(path, body)) == (status, param), (path, body)
    assert session.state()["length"] == 0


def test_a_client_who_leaves_while_waiting_is_forgotten(session: Client) -> None:
    running = Stream(session.server, f"{session.path}/generate", {"text": COUNT, **ENDLESS, "stream": True})
    running.next()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{session.server.url}{session.path}/generate", json={"text": "x", "queue": True, **SHORT}, timeout=0.3
        )
    running.close()
    wait_until(lambda: session.state()["state"] == "idle")
    assert session.state()["turns"] == 0
