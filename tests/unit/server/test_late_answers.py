"""Answers that come when nobody waits any more: the server's sessions are what the engine says they are.

The server's part is its own; the engine is the test, which reads commands and answers when it likes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from roost.front.session import ClientSession
from roost.messages import (
    CloseSession,
    ForkSession,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    Submit,
)
from roost.server import engine_process
from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.session_table import ServerSession
from roost.server.state import ServerState
from roost.text.continuation import Transcript
from tests.support.silent_engine import SilentEngine


def state(session_id: str, length: int = 0, turns: int = 0) -> SessionState:
    """How an idle session stands."""
    return SessionState(
        session_id=session_id,
        length=length,
        resident=0,
        turns=turns,
        state="idle",
        idle_ms=0,
        ttl_ms=None,
        max_tokens=None,
        cache_salt="",
    )


Scene = tuple[ServerState, SilentEngine, httpx.AsyncClient]


@asynccontextmanager
async def scene(monkeypatch: pytest.MonkeyPatch, *, patience_s: int = 0) -> AsyncIterator[Scene]:
    """A server that waits for its engine no longer than it has to, with a session of one turn."""
    monkeypatch.setattr(engine_process, "_ANSWER_S", 0)
    engine = SilentEngine()
    server = ServerState(ServerConfig(health_answer_s=patience_s), engine)
    server.open()
    one = Transcript().add(server.language, length=9, messages=None, output=None)
    server.sessions.add(ServerSession(ClientSession("talk", one)))
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(server)), base_url="http://test"
        ) as http:
            yield server, engine, http
    finally:
        await engine.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test's story."""
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


def test_a_session_opened_after_its_opener_was_refused_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(monkeypatch) as (server, engine, http):
            for path, body in (("/v1/sessions", {"id": "new"}), ("/v1/sessions/talk/fork", {"id": "new"})):
                kind = OpenSession if path == "/v1/sessions" else ForkSession
                assert (await http.post(path, json=body)).status_code == 503
                engine.answer(kind, state("new"))
                assert engine.commands(CloseSession)[-1] == CloseSession(session_id="new")
                assert server.sessions.get("new") is None
            assert len(engine.commands(CloseSession)) == 2
            assert server.sessions.find("talk").holder is None, "it can be forked again"

    run(story)


def test_a_refusal_that_comes_late_closes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(monkeypatch) as (server, engine, http):
            assert (await http.post("/v1/sessions", json={"id": "talk"})).status_code == 503
            engine.answer(OpenSession, Refused(request_id="talk", status=409, message="is open already"))
            assert engine.commands(CloseSession) == [], "the name is another's"
            assert server.sessions.get("talk") is not None

    run(story)


def test_a_rewind_that_comes_late_cuts_the_transcript_and_the_next_turn_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        async with scene(monkeypatch) as (server, engine, http):
            assert (await http.post("/v1/sessions/talk/rewind", json={"turn": 0})).status_code == 503
            assert (await http.post("/v1/sessions/talk/rewind", json={"turn": 0})).status_code == 503, "not free yet"
            assert len(engine.commands(RewindSession)) == 1
            turn = asyncio.create_task(http.post("/v1/sessions/talk/generate", json={"text": "a", "max_tokens": 1}))
            await _settle()
            assert engine.commands(Submit) == [], "what it adds depends on what the session holds"
            engine.answer(RewindSession, state("talk"))
            assert server.sessions.find("talk").client_session.transcript.length == 0
            await _settle()
            assert len(engine.commands(Submit)) == 1
            engine.answer(Submit, Refused(request_id="r0", status=429, message="full"))
            assert (await turn).status_code == 429

    run(story)


def test_a_close_is_taken_over_when_it_comes_and_undone_when_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(monkeypatch) as (server, engine, http):
            assert (await http.delete("/v1/sessions/talk")).status_code == 503
            assert (await http.post("/v1/sessions/talk/rewind", json={"turn": 0})).status_code == 410
            engine.answer(CloseSession, Refused(request_id="talk", status=503, message="too late"))
            assert server.sessions.find("talk").num_closing == 0
            assert (await http.delete("/v1/sessions/talk")).status_code == 503
            engine.answer(CloseSession, SessionClosed(session_id="talk"))
            assert server.sessions.get("talk") is None

    run(story)


def test_whoever_is_cancelled_while_it_waits_leaves_both_sides_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(monkeypatch, patience_s=60) as (server, engine, http):
            asked = {
                OpenSession: http.post("/v1/sessions", json={"id": "new"}),
                RewindSession: http.post("/v1/sessions/talk/rewind", json={"turn": 0}),
            }
            for kind, request in asked.items():
                task = asyncio.create_task(request)
                await _settle()
                assert len(engine.commands(kind)) == 1
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                engine.answer(kind, state("new" if kind is OpenSession else "talk"))
            assert engine.commands(CloseSession) == [CloseSession(session_id="new")]
            assert server.sessions.get("new") is None
            assert server.sessions.find("talk").client_session.transcript.length == 0

    run(story)


def test_nothing_is_kept_of_what_was_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with scene(monkeypatch) as (_, engine, http):
            await http.delete("/v1/sessions/talk")
            engine.answer(CloseSession, SessionClosed(session_id="talk"))
            assert not engine._exchanges

    run(story)


async def _settle() -> None:
    """Let everything happen that can."""
    for _ in range(50):
        await asyncio.sleep(0)
