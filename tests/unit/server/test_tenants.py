"""What reaches the engine says whose it is, whatever endpoint it came by; what concerns everybody is an admin's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from roost.front.session import ClientSession
from roost.messages import Abort, Finished, FlushCache, SpecStats, Submit, Usage
from roost.server import engine_process
from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.keys import read_keys
from roost.server.session_table import ServerSession
from roost.server.state import ServerState
from tests.support.silent_engine import SilentEngine

MINE = {"authorization": "Bearer two"}
SESSION = "/v1/sessions/talk"
TEXT = {"text": "a", "max_tokens": 1}
ASKED: tuple[tuple[str, str, Any], ...] = (
    ("GET", "/v1/sessions", None),
    ("GET", SESSION, None),
    ("DELETE", SESSION, None),
    ("POST", "/v1/sessions", {}),
    ("POST", f"{SESSION}/rewind", {"turn": 0}),
    ("POST", f"{SESSION}/fork", {}),
    ("POST", f"{SESSION}/append", {"text": "a"}),
    ("POST", f"{SESSION}/generate", TEXT),
    ("POST", "/open_session", {"capacity_of_str_len": 1}),
    ("POST", "/open_session", {"capacity_of_str_len": 1, "streaming": True}),
    ("POST", "/close_session", {"session_id": "talk"}),
    ("POST", "/generate", {"text": "a"}),
    ("POST", "/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}),
    ("POST", "/generate", {"text": "a", "session_params": {"id": "talk"}}),
    ("POST", "/v1/completions", {"prompt": "a"}),
    ("POST", "/v1/completions", {"prompt": "a", "session_id": "talk"}),
)


@asynccontextmanager
async def served(*keys: str) -> AsyncIterator[tuple[SilentEngine, httpx.AsyncClient]]:
    """A server with keys, where each client has a session of one name."""
    engine = SilentEngine()
    server = ServerState(ServerConfig(health_answer_s=0), engine, read_keys(ServerConfig(api_key=keys)))
    server.open()
    for client in ("", "key-1", "key-2"):
        server.sessions.add(ServerSession(ClientSession("talk"), client=client))
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=make_app(server)), base_url="http://test"
        ) as http:
            yield engine, http
    finally:
        await engine.stop()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test's story."""
    asyncio.run(asyncio.wait_for(work(), 60))  # type: ignore[arg-type]


async def arrived(engine: SilentEngine, count: int, *tasks: asyncio.Task[Any]) -> None:
    """Wait until so many commands were sent, as long as nobody who should send one was answered without."""
    while len(engine.sent) < count:
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0)


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
@pytest.mark.parametrize(("keys", "client"), [(("two",), ""), (("one", "two"), "key-2")])
def test_every_command_says_whose_key_it_came_with(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], client: str, method: str, path: str, body: Any
) -> None:
    monkeypatch.setattr(engine_process, "_ANSWER_S", 0)

    async def story() -> None:
        async with served(*keys) as (engine, http):
            task = asyncio.create_task(http.request(method, path, json=body, headers=MINE))
            await arrived(engine, 4 if body == {"text": ["a", "b"], "sampling_params": {"n": 2}} else 1)
            assert {command.client for _, command in engine.sent} == {client}  # type: ignore[union-attr]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(story)


def test_a_request_can_be_named_as_anothers_and_is_ended_by_its_own_key_alone() -> None:
    async def story() -> None:
        async with served("one", "two") as (engine, http):
            body, hers = {"text": "a", "rid": "same"}, {"authorization": "Bearer one"}
            tasks = [asyncio.create_task(http.post("/generate", json=body, headers=each)) for each in (hers, MINE)]
            await arrived(engine, 2, *tasks)
            names = {each.client: each.request_id for each in engine.commands(Submit) if isinstance(each, Submit)}
            assert set(names) == {"key-1", "key-2"}
            assert (await http.post("/generate", json=body, headers=MINE)).status_code == 409
            for asked in ({"rid": "same"}, {"abort_all": True}):
                assert (await http.post("/abort_request", json=asked, headers=MINE)).status_code == 200
                assert engine.sent.pop() == (0, Abort(request_id=names["key-2"]))
                assert engine.commands(Abort) == []
            await http.post("/abort_request", json={"abort_all": True}, headers=hers)
            assert engine.commands(Abort) == [Abort(request_id=name) for name in names.values()], (
                "an admin's is for all"
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(story)


def test_what_concerns_everybody_is_for_admin_keys_and_for_whoever_has_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "_ANSWER_S", 0)

    async def story() -> None:
        for keys, status in ((("one", "two"), 403), (("two",), 503), (("two", "one"), 503)):
            async with served(*keys) as (engine, http):
                assert (await http.post("/flush_cache", headers=MINE)).status_code == status
                assert (await http.get("/metrics", headers=MINE)).status_code == status
                assert (await http.get("/server_info", headers=MINE)).status_code == (200 if status == 403 else 503)
                assert bool(engine.commands(FlushCache)) == (status == 503)

    run(story)


def test_however_many_ask_whether_a_token_is_generated_one_is() -> None:
    async def story() -> None:
        async with served("one", "two") as (engine, http):
            asked = [asyncio.create_task(http.get("/health_generate", headers=MINE)) for _ in range(5)]
            await arrived(engine, 1, *asked)
            for _ in range(50):
                await asyncio.sleep(0)
            assert len(engine.commands(Submit)) == 1
            asked[0].cancel()  # who leaves ends nobody else's question
            usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
            end = Finished(request_id="", reason="length", usage=usage, max_new_tokens=1, spec=SpecStats())
            engine.answer(Submit, end)
            assert [answer.status_code for answer in await asyncio.gather(*asked[1:])] == [200] * 4
            again = asyncio.create_task(http.get("/health_generate", headers=MINE))
            await arrived(engine, 2, again)
            engine.answer(Submit, end)
            assert (await again).status_code == 200

    run(story)
