"""Inputs: what a turn of a session is given, in any of its forms, as the tokens that it adds.

Text, token ids or chat messages; for messages, only what the template adds after what the session has. Called by every
endpoint that takes a session.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from roost.errors import RequestError
from roost.front.options import TIMEOUT_S_MIN, Options, TurnOf, milliseconds
from roost.server.context import Desk, renamed_to
from roost.server.generation import Prompt
from roost.server.keys import caller
from roost.server.schema import Message, OpenAiBody, refuse_unsupported
from roost.server.turns import MESSAGE_COST, Turn
from roost.text.language import num_chars

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A session that is this request's for one turn."""

    desk: Desk
    turn: Turn
    of: TurnOf
    ends_at: float | None  # when its time is up, part of which it may have waited for the session

    async def input(
        self,
        *,
        text: str | None = None,
        ids: list[Any] | None = None,
        messages: list[dict[str, Any]] | None = None,
        param: str = "",
        generates: bool = True,
    ) -> tuple[int, ...]:
        """The tokens of what is new, given in one form or in none; only a session's first text begins like a text."""
        turn, plain = self.turn, text if text is not None else ids
        if messages is None and (plain is None or (not plain and turn.length_before)):
            return await self.desk.offload.run(turn.num_chars_before, lambda: turn.no_tokens(generates=generates))
        if messages is not None:
            param = param or "messages"
            length = turn.num_chars_before + num_chars(messages) + MESSAGE_COST * len(messages)
            tokens = await self.desk.offload.run(length, lambda: self._chat(messages, param, generates=generates))
        elif text is not None:
            param = param or "text"
            encoded = await self.desk.offload.run(len(text), lambda: self._encoded(text, param))
            tokens = turn.plain_tokens(encoded, generates=generates)
        else:
            assert ids is not None
            param = param or "input_ids"
            if not all(type(each) is int for each in ids):
                raise RequestError(400, param, "must be a text or a list of token ids: a turn has one prompt")
            tokens = turn.plain_tokens(tuple(ids), generates=generates)
        self.desk.check_len(tokens, param)
        return tokens

    def prompt(self, request_id: str, tokens: tuple[int, ...], options: Options, names: dict[str, str]) -> Prompt:
        """What is asked of the engine for this turn."""
        if self.ends_at is not None:
            options = replace(options, timeout_s=max(TIMEOUT_S_MIN, self.ends_at - time.monotonic()))
        return Prompt(
            request_id=request_id,
            tokens=tokens,
            options=options,
            names=names,
            turn=self.of,
            offset=self.turn.length_before,
            client=self.turn.conversation.client,
            watcher=self.turn,
        )

    def _encoded(self, text: str, param: str) -> tuple[int, ...]:
        language, most = self.desk.language, self.desk.context
        try:
            if self.turn.length_before == 0:
                return language.prompt_tokens(text, tokens_max=most)
            return tuple(language.tokenizer.encode(text, special=False, tokens_max=most))
        except RequestError as error:
            raise renamed_to(error, param) from error

    def _chat(self, messages: list[dict[str, Any]], param: str, *, generates: bool) -> tuple[int, ...]:
        try:
            return self.turn.chat_tokens(messages, generates=generates, tokens_max=self.desk.context)
        except RequestError as error:
            raise (renamed_to(error, param) if error.param == "tokens" else error) from error


@asynccontextmanager
async def taken(
    request: Request,
    session_id: str,
    *,
    number: int | None = None,
    queue: bool = False,
    timeout_s: float | None = None,
) -> AsyncIterator[Taken]:
    """A session for one turn of it; 404, 409 and 410 come from here, or later from the engine."""
    desk: Desk = request.app.state.desk
    if timeout_s is not None:
        milliseconds("timeout", timeout_s)  # refuses what is no time
    ends_at = None if timeout_s is None else time.monotonic() + timeout_s
    of = TurnOf(session_id=session_id, number=number, queue=queue)
    waiting_max = desk.link.limits_of(caller(request).name).queued
    async with desk.conversations.turn(
        request, of, desk.language, timeout_s=timeout_s, waiting_max=waiting_max
    ) as turn:
        yield Taken(desk=desk, turn=turn, of=of, ends_at=ends_at)


def check_no_session(body: OpenAiBody) -> None:
    """Refuse what only a turn of a session can have."""
    for name, is_given in (("turn", body.turn is not None), ("queue", body.queue)):
        if is_given:
            raise RequestError(400, name, "needs session_id")


async def plain_messages(desk: Desk, given: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: text only, and no more of them than a conversation can have tokens."""
    if not given:
        raise RequestError(400, "messages", "must hold at least 1 message")
    if len(given) > desk.context:
        raise RequestError(413, "messages", f"{len(given)} messages exceed the tokens of --context {desk.context}")
    return await desk.offload.run(MESSAGE_COST * len(given), lambda: _plain_messages(given))


def _plain_messages(given: list[Message]) -> list[dict[str, Any]]:
    messages = []
    for number, message in enumerate(given):
        path = f"messages[{number}]."
        refuse_unsupported(message, path)
        if message.role not in _ROLES:
            raise RequestError(400, f"{path}role", "must be system, developer, user or assistant")
        role = "system" if message.role == "developer" else message.role
        content = message.content
        if isinstance(content, list):
            for index, part in enumerate(content):
                refuse_unsupported(part, f"{path}content[{index}].")
                if part.type != "text" or part.text is None:
                    raise RequestError(400, f"{path}content[{index}].type", "must be text, with a text")
            content = "".join(part.text or "" for part in content)
        if content is None:
            raise RequestError(400, f"{path}content", "is required")
        messages.append({"role": role, "content": content} | ({"name": message.name} if message.name else {}))
    return messages
