"""Conversations: whole conversations as tokens, and the sessions in which they go on.

A client that sends its history again goes on as one that sends only what is new: the conversation is rendered as a
whole, with the model's own tokens for its answers, and the session that has most of it keeps what it has in common.
Where all of it, the turn is a turn of that session; where less, a fork of it begins there, or the session itself is
rewound if only its last turn is replaced. Which session is looked at, a label or an earlier response says: it decides
what is computed again, never what comes out. Called by the endpoints for conversations.
"""

from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from roost.errors import CapacityError, RequestError
from roost.front.answer import Answer, Piece
from roost.front.options import Options
from roost.front.own_answers import History
from roost.front.session import ClientSession
from roost.messages import ForkSession, OpenSession, RewindSession
from roost.server.generation import Prompt
from roost.server.inputs import SessionTurn, session_turn
from roost.server.keys import caller
from roost.server.session_table import ServerSession
from roost.server.session_uses import SessionUses
from roost.server.sessions import open_in_engine
from roost.server.state import MESSAGE_COST, ServerState, renamed_to
from roost.text.continuation import Transcript
from roost.text.conversation import OwnAnswer, conversation_tokens
from roost.text.language import num_chars
from roost.tools.answer_form import AnswerForm
from roost.tools.definitions import ToolRequest, tools_len
from roost.tools.events import Content, ToolEvent

LABEL_HEADERS = ("x-session-id", "session_id", "x-claude-code-session-id")
_TRIES = 3  # to lock a session that others may be about to lock as well; then the turn runs without one
_IDLE_MS = 3600 * 1000  # a session that nobody has used for so long is closed by the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation up to where the model answers."""

    tokens: tuple[int, ...]
    ids: NDArray[np.int32]  # the same, to be compared with what sessions hold
    history: History


async def read_conversation(
    server: ServerState,
    messages: list[dict[str, Any]],
    tools: ToolRequest | None,
    *,
    client: str,
    cache_salt: str,
    param: str,
    answers: bool = True,
) -> Conversation:
    """Plain messages as the tokens of a conversation; with `answers`, up to where the model's answer begins."""
    formats, language = server.formats, server.language

    def work() -> Conversation:
        history = History.of(messages, tools, client=client, cache_salt=cache_salt)
        known = server.own_answers.find(history, messages)
        plain = language.escape(formats.messages(messages, tools))
        places = [place for place, message in enumerate(plain) if message["role"] == "assistant"]
        num_answers = sum(message["role"] == "assistant" for message in messages)
        own = {places[number]: answer for number, answer in known.items()} if len(places) == num_answers else {}
        listed = language.escape_tools(formats.template_tools(tools))
        tokens = conversation_tokens(
            language, plain, own, server.text_memo, answers=answers, tools=listed, tokens_max=server.context
        )
        return Conversation(tokens=tokens, ids=np.array(tokens, dtype=np.int32), history=history)

    length = num_chars(messages) + MESSAGE_COST * len(messages) + tools_len(tools)
    try:
        found = await server.offload.run(length, work)
    except RequestError as error:
        raise (renamed_to(error, param) if error.param == "tokens" else error) from error
    server.check_len(found.tokens, param)
    return found


def label_of(request: Request, *given: str | None) -> str:
    """A client's own name for a conversation: of its body, or of a header; '' if it has none."""
    names = (*given, *(request.headers.get(name) for name in LABEL_HEADERS))
    return next((name for name in names if name), "")


def remember(server: ServerState, history: History, answer: Answer) -> None:
    """Keep the tokens of an answer that was given, if its text is all that they say."""
    tokens = tuple(answer.tokens)
    tokenizer = server.language.tokenizer
    said = tokens[:-1] if tokens and tokenizer.is_special(tokens[-1]) else tokens
    if said and answer.finished is not None and answer.finished.reason in ("stop", "length"):
        message = answer.message
        if answer.shown_text(said) == answer.text:
            own = OwnAnswer(tokens=tokens, has_reasoning="reasoning_content" in message)
            server.own_answers.keep(history, message, own)


def events_of(answer: Answer, piece: Piece) -> tuple[ToolEvent, ...]:
    """What a piece adds to an answer, whether or not content, reasoning and calls are told apart."""
    if answer.is_read:
        return piece.events
    return (Content(text=piece.text),) if piece.text else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTurn:
    """Where a conversation goes on."""

    prompt: Prompt
    session_id: str | None = None  # None: in no session


@asynccontextmanager
async def conversation_turn(
    request: Request,
    conversation: Conversation,
    options: Options,
    *,
    request_id: str,
    names: dict[str, str],
    form: AnswerForm | None,
    after: str | None = None,
    label: str = "",
    needs_session: bool = False,
    is_kept: bool = True,
) -> AsyncIterator[ConversationTurn]:
    """The next turn of a conversation, in the session that has most of it.

    `after`: the session of the response that it follows, whose turns all stay as they are. `label`: a name of the
    client's own for its conversations. `needs_session`: without either a session is opened. Not `is_kept`: nothing
    will follow the turn, so it leaves its session as it is and runs in a fork. A session is no condition: where none
    can be had, the turn runs without one.
    """
    server: ServerState = request.app.state.server
    client = caller(request).name
    on_answer = partial(remember, server, conversation.history)
    async with AsyncExitStack() as stack:
        turn = None
        wants_session = (after is not None or label or needs_session) and _may_be_a_turn(server, conversation, options)
        for _ in range(_TRIES if wants_session else 0):
            session_id = await _session_for(
                request, conversation.ids, options.cache_salt, after=after, label=label, is_kept=is_kept
            )
            if session_id is None:
                break
            server.session_uses.add((client, session_id))  # one that nobody else uses is closed at the end
            stack.callback(server.session_uses.drop, (client, session_id))
            turn = await _held(stack, request, session_id, conversation.ids, options)
            if turn is not None:
                break
        if turn is not None:
            if label:
                server.labels.use(client, label, turn.of.session_id)
            new = conversation.tokens[turn.length_before :]
            tokens = turn.lock.turn.input_tokens(ids=new, generates=options.max_new_tokens != 0)
            prompt = replace(turn.prompt(request_id, tokens, options, names, form), on_answer=on_answer)
            yield ConversationTurn(prompt=prompt, session_id=turn.of.session_id)
            return
        prompt = Prompt(
            request_id=request_id,
            tokens=conversation.tokens,
            options=options,
            form=form,
            names=names,
            client=client,
            on_answer=on_answer,
        )
        yield ConversationTurn(prompt=prompt)


def _may_be_a_turn(server: ServerState, conversation: Conversation, options: Options) -> bool:
    """Whether a session would give the same output as no session: it has one at a time, and may be limited."""
    most = server.engine.session_tokens_max
    end = server.context if options.max_new_tokens is None else len(conversation.tokens) + options.max_new_tokens
    return options.n == 1 and (most is None or end <= most)


async def _held(
    stack: AsyncExitStack, request: Request, session_id: str, tokens: NDArray[np.int32], options: Options
) -> SessionTurn | None:
    """A session that holds a beginning of some tokens, locked for a turn; None if somebody else was first."""
    try:
        turn = await stack.enter_async_context(session_turn(request, session_id, timeout_s=options.timeout_s))
    except RequestError as error:
        if error.param == "session_id":
            return None
        raise
    session = turn.lock.session
    if common_prefix_len(session.client_session.tokens, tokens[:-1]) == turn.length_before:
        uses: SessionUses = request.app.state.server.session_uses
        uses.add(session.key)  # until the engine's last event, whoever else forgets it meanwhile
        turn.lock.on_release = partial(uses.drop, session.key)
        return turn
    await stack.aclose()  # another's turn has become its history while it was waited for
    return None


async def _session_for(
    request: Request, tokens: NDArray[np.int32], cache_salt: str, *, after: str | None, label: str, is_kept: bool
) -> str | None:
    """A session that holds a beginning of some tokens and is free for the rest; None if there can be none."""
    server: ServerState = request.app.state.server
    client = caller(request).name
    ids = [after] if after is not None else server.labels.of(client, label)
    sessions = [
        found
        for each in ids
        if (found := server.sessions.get(each, client)) is not None
        and not found.num_closing
        and found.cache_salt == cache_salt
    ]
    best, common_len = None, 0
    for session in reversed(sessions):
        length = common_prefix_len(session.client_session.tokens, tokens[:-1])  # one token at least must run
        if best is None or length > common_len:
            best, common_len = session, length
    try:
        if best is None or not common_len:
            return await _opened(server, client, cache_salt)
        held = best.client_session.tokens
        assert held is not None
        is_free = best.holder is None or not await best.is_busy()  # a turn whose reader has left ends soon
        if is_kept and is_free and common_len == len(held):
            return best.id
        last_turn_at = best.client_session.transcript.before
        if after is None and is_free and last_turn_at is not None and common_len >= last_turn_at.length:
            return await _rewound(request, best, common_len)
        return await _forked(server, best, tokens[:common_len])
    except CapacityError:
        return None  # as many sessions are open as may be
    except RequestError as error:
        if error.param != "session_id":
            raise
        if best is not None and error.status in (404, 410):  # the engine has closed it by itself
            server.sessions.forget(best)
        return await _opened(server, client, cache_salt)


def _make_room(server: ServerState, client: str, keep: ServerSession | None = None) -> None:
    """Close conversations that were not used for longest: half of a client's sessions are for those it opens itself."""
    idle = [each for each in server.sessions.idle_conversations(client) if each is not keep]
    most = max(1, server.engine.sessions_max(client) // 2)
    for session in idle[: max(0, len(idle) + 1 - most)]:
        server.close_session(client, session.id)


async def _opened(server: ServerState, client: str, cache_salt: str) -> str:
    _make_room(server, client)
    session_id = f"conv-{uuid4().hex}"
    command = OpenSession(
        session_id=session_id,
        cache_salt=cache_salt,
        ttl_ms=_IDLE_MS,
        client=client,
        shares=True,
        journaled=False,  # whoever ends sends the whole conversation again
    )
    session = ServerSession(ClientSession(session_id, tokens=array("i")), client=client, cache_salt=cache_salt)
    await open_in_engine(server, command, session)
    return session_id


async def _rewound(request: Request, session: ServerSession, length: int) -> str:
    server: ServerState = request.app.state.server
    async with server.lock_for_change(request, session.id) as lock:
        lock.apply = session.client_session.rewind
        await server.ask_state(RewindSession(session_id=session.id, length=length, client=session.client), lock)
    return session.id


async def _forked(server: ServerState, source: ServerSession, tokens: NDArray[np.int32]) -> str:
    _make_room(server, source.client, keep=source)
    session_id = f"conv-{uuid4().hex}"
    command = ForkSession(session_id=source.id, new_id=session_id, length=len(tokens), client=source.client)
    transcript = Transcript(length=len(tokens), is_chat=False)
    client_session = ClientSession(session_id, transcript, tokens=array("i", tokens.tolist()))
    fork = ServerSession(client_session, client=source.client, cache_salt=source.cache_salt)
    await open_in_engine(server, command, fork)
    return session_id


def common_prefix_len(held: "array[int] | None", tokens: NDArray[np.int32]) -> int:
    """How many first tokens two sequences have in common."""
    if not held:
        return 0
    length = min(len(held), len(tokens))
    differs = np.frombuffer(held, dtype=np.int32)[:length] != tokens[:length]
    return int(differs.argmax()) if differs.any() else length
