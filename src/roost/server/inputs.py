"""Inputs: what an HTTP request gives to a turn of a session, as the tokens that it adds.

Checks text, token ids and chat messages, tokenises long ones beside the event loop, and names the client's parameter
when it refuses. Called by every endpoint that takes a session.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from roost.errors import RequestError
from roost.front.options import TIMEOUT_S_MIN, Options, TurnOf, milliseconds
from roost.front.turn_notes import note_of
from roost.server.generation import Prompt
from roost.server.keys import caller
from roost.server.schema import Message, OpenAiBody, refuse_unsupported
from roost.server.session_table import TurnLock
from roost.server.state import MESSAGE_COST, ServerState, renamed_to
from roost.text.language import num_chars
from roost.tools.answer_form import AnswerForm
from roost.tools.definitions import ToolRequest, tools_len

_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """The turn that an HTTP request makes of a session, which is locked for it."""

    server: ServerState
    lock: TurnLock
    of: TurnOf
    ends_at: float | None  # when its time is up, part of which it may have waited for the session

    @property
    def length_before(self) -> int:
        """Tokens that the session holds before this turn."""
        return self.lock.turn.length_before

    @property
    def is_journaled(self) -> bool:
        """Whether the session can go on without this server."""
        return self.server.sessions.learns and self.lock.session.client_session.tokens is None

    async def input_tokens(
        self,
        *,
        text: str | None = None,
        ids: list[Any] | None = None,
        messages: list[dict[str, Any]] | None = None,
        tools: ToolRequest | None = None,
        param: str = "",
        generates: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of what is new, given in one form or in none; `param` is what the client calls it.

        `tools` go with messages: the session's first ones list them.
        """
        param = param or ("messages" if messages is not None else "text" if text is not None else "input_ids")
        if ids is not None and not all(type(each) is int for each in ids):
            raise RequestError(400, param, "must be a text or a list of token ids: a turn has one prompt")

        def work() -> tuple[int, ...]:
            formats, language, turn = self.server.formats, self.server.language, self.lock.turn
            plain = None if messages is None else formats.session_messages(messages, tools, language, turn.transcript)
            return turn.input_tokens(
                text=text,
                ids=ids,
                messages=plain,
                tools=formats.template_tools(tools),
                generates=generates,
                tokens_max=self.server.context,
            )

        if messages is None and (text or ids):
            num_chars_read = len(text or "")
        else:
            new = num_chars(messages or ()) + MESSAGE_COST * len(messages or ()) + tools_len(tools)
            num_chars_read = self._num_chars_before + new
        try:
            tokens = await self.server.offload.run(num_chars_read, work)
        except RequestError as error:
            is_of_input = error.param == "tokens" or (text is not None and error.param == "text")
            raise (renamed_to(error, param) if is_of_input else error) from error
        self.server.check_len(tokens, param)
        return tokens

    def prompt(
        self,
        request_id: str,
        tokens: tuple[int, ...],
        options: Options,
        names: dict[str, str],
        form: AnswerForm | None = None,
    ) -> Prompt:
        """What is asked of the engine for this turn."""
        note, known_len = "", None
        if self.is_journaled:
            messages, tools, generates = self.lock.turn.given
            note = note_of(self.length_before, messages, tools, generates=generates)
            known_len = self.length_before
        if self.ends_at is not None:
            options = replace(options, timeout_s=max(TIMEOUT_S_MIN, self.ends_at - time.monotonic()))
        return Prompt(
            request_id=request_id,
            tokens=tokens,
            options=options,
            form=form,
            names=names,
            turn=self.of,
            offset=self.length_before,
            known_len=known_len,
            note=note,
            client=self.lock.session.client,
            observer=self.lock,
        )

    @property
    def _num_chars_before(self) -> int:
        """Characters that a template may have to render again for the session's next messages."""
        transcript = self.lock.session.client_session.transcript
        return transcript.num_chars + MESSAGE_COST * transcript.num_messages


@asynccontextmanager
async def session_turn(
    request: Request,
    session_id: str,
    *,
    number: int | None = None,
    queue: bool = False,
    timeout_s: float | None = None,
) -> AsyncIterator[SessionTurn]:
    """A turn of a session that is locked for it; 404, 409 and 410 come from here, or later from the engine."""
    server: ServerState = request.app.state.server
    if timeout_s is not None:
        milliseconds("timeout", timeout_s)  # refuses what is no time
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    of = TurnOf(session_id=session_id, number=number, queue=queue)
    await server.learn_of(session_id, caller(request).name)
    waiting_max = server.engine.limits_of(caller(request).name).queued
    async with server.sessions.lock_for_turn(
        request, of, server.language, timeout_s=timeout_s, waiting_max=waiting_max
    ) as lock:
        yield SessionTurn(server=server, lock=lock, of=of, ends_at=ends_at)


def check_no_session(body: OpenAiBody) -> None:
    """Refuse what only a turn of a session can have."""
    for name, is_given in (("turn", body.turn is not None), ("queue", body.queue)):
        if is_given:
            raise RequestError(400, name, "needs session_id")


async def plain_messages(server: ServerState, given: list[Message]) -> list[dict[str, Any]]:
    """Messages in plain values: text only, and no more of them than a conversation can have tokens."""
    if not given:
        raise RequestError(400, "messages", "must hold at least 1 message")
    check_num_messages(server, len(given), "messages")
    return await server.offload.run(MESSAGE_COST * len(given), lambda: _plain_messages(given))


def check_num_messages(server: ServerState, number: int, param: str) -> None:
    """Refuse more messages than a conversation can have tokens."""
    if number > server.context:
        raise RequestError(413, param, f"{number} messages exceed the tokens of --context {server.context}")


def _plain_messages(given: list[Message]) -> list[dict[str, Any]]:
    messages = []
    for number, message in enumerate(given):
        path = f"messages[{number}]."
        refuse_unsupported(message, path)
        if message.role not in _ROLES:
            raise RequestError(400, f"{path}role", "must be system, developer, user, assistant or tool")
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if isinstance(content, list):
            for index, part in enumerate(content):
                refuse_unsupported(part, f"{path}content[{index}].")
                if part.type != "text" or part.text is None:
                    raise RequestError(400, f"{path}content[{index}].type", "must be text, with a text")
            content = "".join(part.text or "" for part in content)
        if content is None and not message.tool_calls:
            raise RequestError(400, f"{path}content", "is required")
        if message.reasoning_content is not None and message.role != "assistant":
            raise RequestError(400, f"{path}reasoning_content", "is for the role assistant")
        optional = {
            "name": message.name,
            "tool_calls": message.tool_calls or None,  # some clients send an empty list
            "tool_call_id": message.tool_call_id,
            "reasoning_content": message.reasoning_content,
        }
        given_too = {name: value for name, value in optional.items() if value is not None}
        messages.append({"role": role, "content": content or "", **given_too})
    return messages
