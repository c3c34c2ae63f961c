"""Whole conversations in sessions: which session goes on, what is sent to it, and what is left behind.

The server's part is its own; the engine is a stand-in whose sessions are lists of tokens.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from roost.front.session import ClientSession
from roost.messages import CloseSession, ForkSession, OpenSession, RewindSession, Submit
from roost.server import conversations
from roost.server.labels import SESSIONS_PER_LABEL
from roost.server.session_table import ServerSession
from roost.text.continuation import Transcript
from tests.support.talking_engine import SAID, talking_server, until

HOUR_MS = 3_600_000


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Run a test's story."""
    asyncio.run(story())  # type: ignore[arg-type]


async def respond(http: httpx.AsyncClient, text: str, **changes: Any) -> dict[str, Any]:
    """A response, which must be complete."""
    answer = await http.post("/v1/responses", json={"input": text, **changes})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    assert made["status"] == "completed"
    return made


def cached(response: dict[str, Any]) -> int:
    """Tokens that it inherited."""
    found: int = response["usage"]["input_tokens_details"]["cached_tokens"]
    return found


async def chat(http: httpx.AsyncClient, texts: list[str], label: str = "work") -> int:
    """A chat with a label, of questions that were all answered but the last; returns what it inherited."""
    messages = [{"role": "user", "content": texts[0]}]
    for text in texts[1:]:
        messages += [{"role": "assistant", "content": SAID}, {"role": "user", "content": text}]
    answer = await http.post("/v1/chat/completions", json={"messages": messages, "prompt_cache_key": label})
    assert answer.status_code == 200, answer.text
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_response_goes_on_in_place_and_a_second_child_in_a_fork() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            first = await respond(http, "One.")
            total = first["usage"]["total_tokens"]
            second = await respond(http, "Two.", previous_response_id=first["id"])
            assert cached(second) == total and len(engine.sessions) == 1
            other = await respond(http, "Three.", previous_response_id=first["id"])
            (fork,) = engine.commands(ForkSession)
            assert isinstance(fork, ForkSession) and fork.length is not None
            assert total <= fork.length < second["usage"]["input_tokens"]
            assert cached(other) == fork.length and len(engine.sessions) == 2

    run(story)


def test_what_is_not_stored_leaves_the_session_as_it_was() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            first = await respond(http, "One.")
            before = {key: list(tokens) for key, tokens in engine.sessions.items()}
            await respond(http, "Two.", previous_response_id=first["id"], store=False)
            assert engine.sessions == before
            await respond(http, "Alone.", store=False)
            assert engine.sessions == before and len(engine.commands(OpenSession)) == 1

    run(story)


def test_sessions_close_with_the_last_response_that_lies_in_them() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            first = await respond(http, "One.")
            second = await respond(http, "Two.", previous_response_id=first["id"])
            for made, num_left in ((first, 1), (second, 0)):
                assert (await http.delete(f"/v1/responses/{made['id']}")).status_code == 200
                assert len(engine.sessions) == num_left

    run(story)


def test_a_resent_history_is_the_next_turn_of_the_session_that_its_label_finds() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            await chat(http, ["One."])
            (held,) = engine.sessions.values()
            length = len(held)
            assert await chat(http, ["One.", "Two."]) == length
            assert await chat(http, ["One.", "Two."], label="other") == 0
            opened = engine.commands(OpenSession)
            assert len(opened) == 2 and {each.ttl_ms for each in opened if isinstance(each, OpenSession)} == {HOUR_MS}
            assert all(each.shares for each in opened if isinstance(each, OpenSession))

    run(story)


def test_a_last_turn_that_is_said_differently_is_rewound_and_an_earlier_one_forked() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            for texts in (["One."], ["One.", "Two."], ["One.", "Two.", "Three."]):
                await chat(http, texts)
            assert await chat(http, ["One.", "Two.", "Four."]) > 0
            assert len(engine.commands(RewindSession)) == 1 and not engine.commands(ForkSession)
            assert await chat(http, ["One.", "Five."]) > 0
            assert len(engine.commands(RewindSession)) == len(engine.commands(ForkSession)) == 1

    run(story)


def test_two_at_once_under_one_label_are_a_turn_and_a_fork_of_what_was_committed() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            await chat(http, ["One."])
            engine.holds = True
            asks = [asyncio.create_task(chat(http, ["One.", text])) for text in ("Two.", "Three.")]
            await until(lambda: len(engine.held) == 2)
            engine.let_go()
            found = [await ask for ask in asks]
            assert min(found) > 0 and len(engine.commands(ForkSession)) == 1
            assert all(isinstance(each, Submit) and each.session_id for each in engine.commands(Submit))

    run(story)


def test_a_label_with_many_helpers_ends_none_of_them() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            engine.holds = True
            asks = [asyncio.create_task(chat(http, [f"{number}."])) for number in range(SESSIONS_PER_LABEL + 3)]
            await until(lambda: len(engine.held) == len(asks))
            assert len(engine.sessions) == len(asks)
            engine.let_go()
            assert [await ask for ask in asks] == [0] * len(asks)
            await until(lambda: len(engine.sessions) == SESSIONS_PER_LABEL)

    run(story)


def test_another_salt_has_a_session_of_its_own() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            for salt in ("", "s", "t", "s"):
                body = {"messages": [{"role": "user", "content": "One."}], "prompt_cache_key": "work"}
                answer = await http.post("/v1/chat/completions", json={**body, "cache_salt": salt})
                assert answer.status_code == 200, answer.text
            assert [each.cache_salt for each in engine.commands(OpenSession) if isinstance(each, OpenSession)] == [
                "",
                "s",
                "t",
            ]

    run(story)


def test_a_deleted_response_ends_no_turn_that_follows_it_and_a_deleted_conversation_stays_away() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            first = await respond(http, "One.")
            kept = (await http.post("/v1/conversations", json={})).json()["id"]
            engine.holds = True
            asks = [
                asyncio.create_task(respond(http, "Two.", previous_response_id=first["id"])),
                asyncio.create_task(respond(http, "Two.", conversation=kept)),
            ]
            await until(lambda: len(engine.held) == len(asks))
            for path in (f"/v1/responses/{first['id']}", f"/v1/conversations/{kept}"):
                assert (await http.delete(path)).status_code == 200
            engine.let_go()
            second, last = [await ask for ask in asks]
            assert (await http.get(f"/v1/conversations/{kept}")).status_code == 404
            for made in (second, last):
                await http.delete(f"/v1/responses/{made['id']}")
            assert not engine.sessions

    run(story)


def test_a_session_that_has_gone_on_meanwhile_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):

            async def other_tokens(request: Any, *args: Any, **named: Any) -> str:
                grown = Transcript(length=3, is_chat=False)
                held = ClientSession("grown", grown, tokens=array("i", [5, 6, 7]))
                request.app.state.server.sessions.add(ServerSession(held))
                return "grown"

            monkeypatch.setattr(conversations, "_session_for", other_tokens)
            assert await chat(http, ["One."]) == 0
            (submit,) = engine.commands(Submit)
            assert isinstance(submit, Submit) and submit.session_id is None

    run(story)


@pytest.mark.parametrize("num_stored", [3, 6])
def test_conversations_take_half_of_the_sessions_and_the_least_recently_used_goes_first(num_stored: int) -> None:
    async def story() -> None:
        async with talking_server(max_sessions=8) as (engine, http):
            made = [await respond(http, f"Number {number}.") for number in range(num_stored)]
            assert len(engine.sessions) == min(4, num_stored)
            again = await respond(http, "More.", previous_response_id=made[0]["id"])
            assert (cached(again) > 0) == (num_stored <= 4)  # it is computed again where its session had to go

    run(story)


def test_a_session_that_the_engine_has_closed_is_opened_anew() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            first = await respond(http, "One.")
            await respond(http, "Two.", previous_response_id=first["id"])
            engine.sessions.clear()
            again = await respond(http, "Three.", previous_response_id=first["id"])
            assert cached(again) == 0 and len(engine.commands(OpenSession)) == 2

    run(story)


def test_a_reader_that_leaves_leaves_no_session_behind() -> None:
    async def story() -> None:
        async with talking_server() as (engine, http):
            engine.holds = True
            asked = asyncio.create_task(respond(http, "One."))
            await until(lambda: bool(engine.held))
            asked.cancel()
            await asyncio.wait({asked})
            await until(lambda: not engine.sessions)
            assert engine.commands(CloseSession)

    run(story)
