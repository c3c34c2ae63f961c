"""Many clients, few sessions, every kind of request, and clients that leave: whatever comes, the server rests after."""

import random
from typing import Any

import httpx

from tests.server.conftest import StartTiny
from tests.server.test_ends import in_background
from tests.support.server_process import Server

CLIENTS, REQUESTS = 8, 60
TINY = ("--pool-tokens", "2048", "--max-running", "4", "--chunk", "64")
FEW = ("--max-sessions", "6", "--max-resident-tokens", "600", "--session-ttl-s", "2", "--max-queued", "16")
NAMES = [f"s{number}" for number in range(8)]
EXPECTED = {200, 201, 400, 404, 409, 410, 413, 429, 499, 504}  # 499: its session was closed meanwhile


def drawn(draw: random.Random) -> tuple[str, str, dict[str, Any] | None]:
    """A method, a path and a body, mostly good ones."""
    name = draw.choice(NAMES)
    messages = [{"role": "user", "content": "x" * draw.randint(0, 30)}]
    ids = [draw.randint(3, 50) for _ in range(draw.randint(0, 40))]
    given: dict[str, Any] = draw.choice(
        ({"text": "abc" * draw.randint(0, 20)}, {"input_ids": ids}, {"messages": messages})
    )
    turn: dict[str, Any] = {"queue": draw.random() < 0.5}
    turn |= {"timeout": draw.choice((0.001, 0.05, 5))} if draw.random() < 0.3 else {}
    turn |= {"turn": draw.randint(0, 4)} if draw.random() < 0.3 else {}
    options = {"max_tokens": draw.choice((0, 1, 5, 30)), "ignore_eos": draw.random() < 0.5, **turn}
    native = {"capacity_of_str_len": 1, "session_id": name, "streaming": draw.random() < 0.5}
    params = {"session_params": {"id": name}, "sampling_params": {"max_new_tokens": draw.choice((0, 1, 8))}}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "stream": draw.random() < 0.5}
    path = f"/v1/sessions/{name}"
    return draw.choice(
        (
            *[("POST", "/v1/sessions", {"id": name, "ttl_s": draw.choice((0.05, 1, 60))})] * 2,
            ("POST", "/open_session", {**native, "timeout": draw.choice((0.05, 1))}),
            ("POST", f"{path}/append", {**given, **turn}),
            *[("POST", f"{path}/generate", {**given, **options, "stream": draw.random() < 0.5})] * 4,
            ("POST", "/v1/chat/completions", {"messages": messages, "session_id": name, **options}),
            ("POST", "/generate", {"input_ids": [7, *ids], **params, **logprobs}),
            ("POST", f"{path}/rewind", draw.choice(({"turn": draw.randint(0, 3)}, {"length": draw.randint(0, 80)}))),
            ("POST", f"{path}/fork", {"id": draw.choice(NAMES)}),
            ("POST", "/close_session", {"session_id": name}),
            ("DELETE", path, None),
            ("GET", path, None),
            ("GET", "/v1/sessions", None),
        )
    )


def visit(server: Server, seed: int) -> list[Any]:
    """One client's requests, some of which it does not wait for; gives what should not have been answered."""
    draw, wrong = random.Random(seed), []
    for _ in range(REQUESTS):
        method, path, body = drawn(draw)
        patience_s = draw.choice((0.005, 0.05)) if draw.random() < 0.2 else 120
        try:
            answer = httpx.request(method, f"{server.url}{path}", json=body, timeout=patience_s)
        except httpx.TimeoutException:
            continue
        if answer.status_code not in EXPECTED or "internal" in answer.text:
            wrong.append((method, path, body, answer.text))
    return wrong


def test_whatever_many_clients_ask_of_few_sessions_leaves_nothing_behind(start_tiny: StartTiny) -> None:
    server = start_tiny(*TINY, *FEW)
    visits = [in_background(lambda seed=seed: visit(server, seed)) for seed in range(CLIENTS)]
    assert [each() for each in visits] == [[]] * CLIENTS
    for state in server.http.get("/v1/sessions").json()["data"]:
        assert server.http.delete(f"/v1/sessions/{state['id']}").status_code in (200, 404)
    server.check_rest()
    stats = server.stats()
    assert stats["sessions_opened"] == stats["sessions_closed"] + stats["sessions_expired"] > 0
    assert server.stop() == 0
