"""Inputs: what a turn of a session is given, in any of its forms, as the tokens that it adds.

Text, token ids or chat messages; for messages, only what the template adds after what the session has. Called by every
endpoint that takes a session.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from roost.errors import RequestError
from roost.front.options import Options, TurnOf
from roost.server.body import aside
from roost.server.desk import Desk
from roost.server.generation import Prompt
from roost.server.schema import Message, OpenAiBody, refuse_unsupported
from roost.server.turns import Turn

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A session that is this request's for one turn."""

    desk: Desk
    turn: Turn
    of: TurnOf

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
        turn = self.turn
        if messages is not None:
            param = param or "messages"
            length = sum(len(message["content"]) for message in messages)
            tokens = await aside(length, lambda: turn.chat_tokens(messages, generates=generates))
        elif text is not None:
            param = param or "text"
            tokens = turn.plain_tokens(await aside(len(text), lambda: self._encoded(text, param)), generates=generates)
        elif ids is not None:
            param = param or "input_ids"
            if not all(type(each) is int for each in ids):
                raise RequestError(400, param, "must be a text or a list of token ids: a turn has one prompt")
            tokens = turn.plain_tokens(tuple(ids), generates=generates)
        else:
            return turn.no_tokens()
        self.desk.check_len(tokens, param)
        return tokens

    def prompt(self, name: str, tokens: tuple[int, ...], options: Options, names: dict[str, str]) -> Prompt:
        """What is asked of the engine for this turn."""
        return Prompt(
            request_id=name,
            tokens=tokens,
            options=options,
            names={**names, "salt": "cache_salt"},
            turn=self.of,
            offset=self.turn.length_before,
            watcher=self.turn,
        )

    def _encoded(self, text: str, param: str) -> tuple[int, ...]:
        language = self.desk.language
        try:
            if self.turn.length_before == 0:
                return language.prompt_tokens(text)
            return tuple(language.tokenizer.encode(text, special=False))
        except RequestError as error:
            raise RequestError(error.status, param, error.reason) from error


@asynccontextmanager
async def taken(
    request: Request, session_id: str, *, number: int | None = None, queue: bool = False
) -> AsyncIterator[Taken]:
    """A session for one turn of it; 404, 409 and 410 come from here, or later from the engine."""
    desk: Desk = request.app.state.desk
    async with desk.conversations.turn(request, session_id, desk.language, queue=queue) as turn:
        yield Taken(desk=desk, turn=turn, of=TurnOf(session_id=session_id, number=number, queue=queue))


def check_no_session(body: OpenAiBody) -> None:
    """Refuse what only a turn of a session can have."""
    for name, is_given in (("turn", body.turn is not None), ("queue", body.queue)):
        if is_given:
            raise RequestError(400, name, "needs session_id")


def plain_messages(given: list[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: text only."""
    if not given:
        raise RequestError(400, "messages", "must hold at least 1 message")
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
