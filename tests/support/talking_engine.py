"""An engine without a process that answers by itself: sessions are lists of tokens, every output is the same text.

Answers come on the next turn of the event loop. While `holds`, requests wait until they are let go.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx

from roost.config.options import EngineConfig, SessionConfig
from roost.messages import (
    Abort,
    Begun,
    CloseSession,
    Command,
    CompileGrammar,
    Finished,
    ForkSession,
    GrammarCompiled,
    OpenSession,
    Refused,
    RewindSession,
    SessionState,
    SpecStats,
    Submit,
    Tokens,
    Usage,
)
from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.keys import NO_KEYS, Keys
from roost.server.state import ServerState
from roost.text.language import Language
from roost.text.template import ChatTemplate
from tests.support.silent_engine import SilentEngine
from tests.support.small_vocabularies import byte_level
from tests.unit.text.test_template import CHAT

SAID = "Fine."
CONTEXT = 2048


class TalkingEngine(SilentEngine):
    """An engine that says the same to everything."""

    def __init__(self, max_sessions: int = 1024) -> None:
        super().__init__()
        assert self.started is not None
        self._config = EngineConfig(session=SessionConfig(max_sessions=max_sessions))
        template = ChatTemplate(CHAT, bos="<|endoftext|>", eos="<|im_end|>")
        language = Language(tokenizer=byte_level(), template=template)
        self.started = replace(self.started, language=language.to_json(), context=CONTEXT)
        self._output = language.text_tokens(SAID)
        self.sessions: dict[tuple[str, str], list[int]] = {}
        self.ends: dict[tuple[str, str], list[int]] = {}  # of their turns
        self.holds = False
        self.held: list[tuple[int, Submit]] = []

    async def _send(self, number: int, command: Command, read_by: int | None = None) -> None:
        await super()._send(number, command, read_by)
        asyncio.get_running_loop().call_soon(self._hear, number, command)

    def tell(self, command: Command) -> None:
        """Close a session, or end a request that is held."""
        super().tell(command)
        if isinstance(command, CloseSession):
            self.sessions.pop((command.client, command.session_id), None)
        if isinstance(command, Abort):
            for number, submit in [each for each in self.held if each[1].request_id == command.request_id]:
                self.held.remove((number, submit))
                self.receive(number, self._finished(submit, "abort", 0, 0))

    def let_go(self) -> None:
        """Answer what is held."""
        held, self.held = self.held, []
        for number, submit in held:
            self._talk(number, submit)

    def _hear(self, number: int, command: Command) -> None:
        match command:
            case OpenSession():
                self._open(number, command.client, command.session_id, [], [])
            case ForkSession():
                source = self.sessions.get((command.client, command.session_id))
                if source is None:
                    self.receive(number, Refused(request_id="", status=404, message="none", param="session_id"))
                    return
                assert command.length is not None
                self._open(number, command.client, command.new_id, source[: command.length], [])
            case RewindSession():
                key = (command.client, command.session_id)
                del self.sessions[key][command.length :]
                self.ends[key] = [end for end in self.ends[key] if end <= len(self.sessions[key])]
                self.receive(number, self._state(*key))
            case CompileGrammar():
                self.receive(number, GrammarCompiled())
            case Submit() if self.holds:
                self.held.append((number, command))
            case Submit():
                self._talk(number, command)

    def _open(self, number: int, client: str, name: str, tokens: list[int], ends: list[int]) -> None:
        self.sessions[client, name], self.ends[client, name] = tokens, ends
        self.receive(number, self._state(client, name))

    def _state(self, client: str, name: str) -> SessionState:
        key = (client, name)
        return SessionState(
            session_id=name,
            length=len(self.sessions[key]),
            resident=0,
            turns=len(self.ends[key]),
            state="idle",
            idle_ms=0,
            ttl_ms=None,
            max_tokens=None,
            cache_salt="",
            client=client,
        )

    def _talk(self, number: int, submit: Submit) -> None:
        key = (submit.client, submit.session_id or "")
        held = self.sessions.get(key, [])
        num_cached, prompt = len(held), [*held, *submit.tokens]
        begun = Begun(request_id=submit.request_id, prompt_tokens=len(prompt), cached_tokens=num_cached)
        self.receive(number, begun)
        output = () if submit.max_new_tokens == 0 else self._output
        if output:
            self.receive(number, Tokens(request_id=submit.request_id, tokens=output))
        if key in self.sessions:
            held += [*submit.tokens, *output]
            self.ends[key].append(len(held))
        self.receive(number, self._finished(submit, "stop", len(prompt), num_cached, len(output)))

    def _finished(self, submit: Submit, reason: str, num_prompt: int, num_cached: int, num_new: int = 0) -> Finished:
        usage = Usage(prompt_tokens=num_prompt, cached_tokens=num_cached, completion_tokens=num_new)
        return Finished(request_id=submit.request_id, reason=reason, usage=usage, max_new_tokens=99, spec=SpecStats())


@asynccontextmanager
async def talking_server(
    max_sessions: int = 1024, keys: Keys = NO_KEYS
) -> AsyncIterator[tuple[TalkingEngine, httpx.AsyncClient]]:
    """A server over such an engine, and a client of it."""
    engine = TalkingEngine(max_sessions)
    server = ServerState(ServerConfig(), engine, keys)
    server.open()
    transport = httpx.ASGITransport(app=make_app(server))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield engine, http
    finally:
        await engine.stop()


async def until(is_so: Callable[[], bool]) -> None:
    """Let the server work until something is so."""
    for _ in range(10_000):
        if is_so():
            return
        await asyncio.sleep(0)
    raise AssertionError("waited in vain")
