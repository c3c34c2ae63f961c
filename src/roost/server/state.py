"""Server state: what every endpoint of the server shares.

Owns the engine's process, the model's tokenizer and chat template, the open sessions and the measurements. Turns
prompts and chats into tokens, beside the event loop where they are long. Called by the endpoints.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from roost.errors import CapacityError, RequestError
from roost.front.answer import refusal
from roost.front.engine_client import Observer
from roost.front.own_answers import OwnAnswers
from roost.front.turn_notes import session_of
from roost.messages import (
    CloseSession,
    Command,
    CompileGrammar,
    Event,
    GetHistory,
    Refused,
    SessionHistory,
    SessionState,
)
from roost.server.background_threads import OffloadThreads
from roost.server.config import ServerConfig
from roost.server.engine_process import RESTARTING, EngineProcess
from roost.server.keys import NO_KEYS, Keys, caller
from roost.server.labels import Labels
from roost.server.live_hub import LiveHub
from roost.server.metrics import Metrics
from roost.server.response_store import ResponseStore
from roost.server.session_table import ChangeLock, ServerSession, SessionTable
from roost.server.session_uses import SessionUses
from roost.text.conversation import TextMemo
from roost.text.language import Language, num_chars
from roost.text.tokenizer import too_long
from roost.tools.answer_form import Found, Grammar, Search, advance
from roost.tools.definitions import ToolRequest, tools_len
from roost.tools.model_formats import ModelFormats, formats_of

PROMPTS_MAX = 256  # in one request
COMPILE_S = 180  # longest that a grammar is waited for: as many as may wait, each with all the time that it may take
MESSAGE_COST = 64  # a template takes as long for a message as for so many characters of its content


class ServerState:
    """What the endpoints share."""

    def __init__(self, config: ServerConfig, engine: EngineProcess, keys: Keys = NO_KEYS) -> None:
        self.config = config
        self.engine = engine
        self.keys = keys
        self.metrics = Metrics()
        self.sessions = SessionTable()
        self.session_uses = SessionUses(self.close_session)
        self.labels = Labels(self.session_uses)
        self.own_answers = OwnAnswers()
        self.text_memo = TextMemo()
        self.responses = ResponseStore(
            count_max=config.max_responses,
            bytes_max=config.max_response_mb * 2**20,
            age_s_max=config.response_ttl_s,
            uses=self.session_uses,
        )
        self.offload = OffloadThreads()
        self.probe: asyncio.Task[None] | None = None  # the last check that tokens are generated
        self.started_at = int(time.time())  # seconds of the Unix clock
        self.is_draining = False
        self.detached: set[asyncio.Task[None]] = set()  # what runs without an HTTP request that waits for it
        self.live: LiveHub | None = None  # None: nobody has watched yet
        self._language: Language | None = None
        self._formats: ModelFormats | None = None

    def open(self) -> None:
        """The engine is ready; raises ConfigError if the model cannot write tool calls as the flags say."""
        assert self.engine.started is not None
        self.sessions.learns = self.engine.has_journal
        language = Language.from_json(self.engine.started.language)
        formats = {"tool_format": self.config.tool_format, "reasoning_format": self.config.reasoning_format}
        self._formats = formats_of(language, **formats)
        self._language = language

    def check_alive(self) -> None:
        """503 while the model loads, after the engine has ended, and until another one is ready."""
        if self.engine.is_gone.is_set():
            raise CapacityError(503, "the engine is not running")
        if self._language is None:
            raise CapacityError(503, "the model is loading")
        if self.engine.is_restarting:
            raise CapacityError(503, RESTARTING)

    def check_ready(self) -> None:
        """503 if no new work is taken now."""
        self.check_alive()
        if self.is_draining:
            raise CapacityError(503, "the server is stopping")

    @property
    def language(self) -> Language:
        """The model's tokenizer and chat template; there while the server stops, too."""
        assert self._language is not None
        return self._language

    @property
    def formats(self) -> ModelFormats:
        """How the model writes tool calls and reasoning."""
        assert self._formats is not None
        return self._formats

    @property
    def model_name(self) -> str:
        """The name the model is served by, the first if it has several."""
        assert self.engine.started is not None
        return next(iter(self.config.served_model_name), self.engine.started.model_name)

    async def ask(self, command: Command, observer: Observer | None = None, *, limit_s: float | None = None) -> Event:
        """The engine's answer to a command that has one; 503 if it was not carried out in time, or no answer came."""
        limit_s = self.config.health_answer_s if limit_s is None else limit_s
        answer = await self.engine.ask(command, limit_s, observer)
        if answer is None:
            raise CapacityError(503, f"the engine has not answered for {limit_s} s")
        if isinstance(answer, Refused) and answer.status == 503:
            raise refusal(answer)
        return answer

    async def ask_state(self, command: Command, observer: Observer | None = None) -> SessionState:
        """The session's state that answers a command; a refusal is raised."""
        answer = await self.ask(command, observer)
        if isinstance(answer, Refused):
            raise refusal(answer)
        assert isinstance(answer, SessionState), answer
        return answer

    async def find(self, search: Search[Found], length: int) -> Found:
        """What a search for grammars finds, made of so many characters; they are compiled beside the engine."""
        asked = await self.offload.run(length, partial(advance, search))
        while isinstance(asked, Grammar):
            answer = await self.ask(CompileGrammar(grammar=asked.text), limit_s=COMPILE_S)
            error = refusal(answer) if isinstance(answer, Refused) else None
            if isinstance(error, CapacityError):
                raise error
            asked = await self.offload.run(length, partial(advance, search, "" if error is None else error.reason))
        return asked

    def follow(self, task: "asyncio.Task[None]") -> "asyncio.Task[None]":
        """Have the server not stop before a task has ended."""
        self.detached.add(task)
        task.add_done_callback(self.detached.discard)
        return task

    def close_expired(self) -> None:
        """Close the sessions whose time is up as only the server knows; the engine does so with all others."""
        for session in self.sessions.expired():
            self.sessions.forget(session)
            # whenever the engine reads it: that is before anything sent later
            self.engine.tell(CloseSession(session_id=session.id, client=session.client))

    def close_session(self, client: str, session_id: str) -> None:
        """Close a client's session that nothing will go on in; nobody waits for it."""
        session = self.sessions.get(session_id, client)
        if session is not None:
            self.sessions.forget(session)
        self.engine.tell(CloseSession(session_id=session_id, client=client))

    async def learn_of(self, session_id: str, client: str) -> None:
        """Ask the engine for a session that is not known here, where a journal may have it."""
        if not self.sessions.learns or self.sessions.get(session_id, client) is not None:
            return
        answer = await self.ask(GetHistory(session_id=session_id, client=client))
        if isinstance(answer, SessionHistory):
            known = await self.offload.run(len(answer.turns), lambda: session_of(session_id, answer, self.language))
            if self.sessions.get(session_id, client) is None:
                self.sessions.add(ServerSession(known, client=client))
        elif isinstance(answer, Refused) and answer.status != 404:
            raise refusal(answer)

    @asynccontextmanager
    async def lock_for_change(self, request: Request, session_id: str) -> AsyncIterator[ChangeLock]:
        """A session locked for a rewind or a fork."""
        await self.learn_of(session_id, caller(request).name)
        within_s = self.config.health_answer_s
        async with self.sessions.lock_for_change(request, session_id, within_s=within_s) as lock:
            yield lock

    @property
    def context(self) -> int:
        """The most tokens that a request may have, output included."""
        assert self.engine.started is not None
        return self.engine.started.context

    async def prompt_tokens(self, given: str | list[Any], param: str) -> list[tuple[int, ...]]:
        """The tokens of one or several prompts, given as text or as ids."""
        if isinstance(given, list) and len(given) > max(PROMPTS_MAX, self.context):
            if type(given[0]) is int:
                raise renamed_to(too_long(str(len(given)), self.context), param)
            raise _too_many_prompts(given, param)
        each_len = (len(each) if isinstance(each, str | list) else 1 for each in given)
        length = len(given) if isinstance(given, str) else sum(each_len)
        prompts = await self.offload.run(length, lambda: self._prompts(given, param))
        for tokens in prompts:
            self.check_len(tokens, param)
        return prompts

    async def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        param: str,
        *,
        tools: ToolRequest | None = None,
        add_generation_prompt: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of a conversation, up to where the model answers unless told otherwise."""
        formats, listed, asks = self.formats, self.formats.template_tools(tools), add_generation_prompt

        def work() -> tuple[int, ...]:
            plain, context = formats.messages(messages, tools), self.context
            return self.language.chat_tokens(plain, tools=listed, add_generation_prompt=asks, tokens_max=context)

        length = num_chars(messages) + MESSAGE_COST * len(messages) + tools_len(tools)
        try:
            tokens = await self.offload.run(length, work)
        except RequestError as error:
            raise (renamed_to(error, param) if error.param == "tokens" else error) from error
        self.check_len(tokens, param)
        return tokens

    def check_len(self, tokens: tuple[int, ...], param: str) -> None:
        """Refuse more tokens than the context holds, before the engine has to read them."""
        if len(tokens) > self.context:
            raise renamed_to(too_long(str(len(tokens)), self.context), param)

    def _prompts(self, given: str | list[Any], param: str) -> list[tuple[int, ...]]:
        if isinstance(given, str):
            return [self._tokens(given, param)]
        if given and all(type(each) is int for each in given):
            return [tuple(given)]
        if not 1 <= len(given) <= PROMPTS_MAX:
            raise _too_many_prompts(given, param)
        return [self._tokens(each, param) for each in given]

    def _tokens(self, given: Any, param: str) -> tuple[int, ...]:
        if isinstance(given, str):
            try:
                return self.language.prompt_tokens(given, tokens_max=self.context)
            except RequestError as error:
                raise renamed_to(error, param) from error
        if not isinstance(given, list) or not all(type(each) is int for each in given):
            raise RequestError(400, param, "must be a text, a list of token ids, or a list of either")
        return tuple(given)


def renamed_to(error: RequestError, param: str) -> RequestError:
    """The same refusal, under the client's name for the parameter."""
    return RequestError(error.status, param, error.reason)


def _too_many_prompts(given: list[Any], param: str) -> RequestError:
    return RequestError(400, param, f"must hold 1 to {PROMPTS_MAX} prompts, got {len(given)}")
