"""Turns: which session has a turn on its way, who waits for it, and what each session's chat has said so far.

The engine holds a session's tokens; here is only what is needed to make the next ones: whether it is empty, and the
transcript of its messages. What the engine says was done is taken over whether or not anybody waits to hear it.
A turn whose reader has left is as good as ended: the next one waits for its last event and goes on from there, whatever
it says. Called by the endpoints that take a session.
"""

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from starlette.requests import Request

from roost.errors import CapacityError, RequestError
from roost.front.answer import RepeatedTurn
from roost.front.options import TurnOf
from roost.messages import Event, Finished, Refused, SessionClosed, SessionState, Tokens, Usage
from roost.server.generation import while_connected
from roost.server.keys import caller
from roost.text.continuation import Transcript, continuation
from roost.text.language import EscapedMessage, Language

WAITING_MAX = 64  # turns that wait for one session
CHECK_AT_MIN = 1024  # sessions known here, above which those whose time was up in the engine are looked for
BRANCHES_MAX = 256  # ended requests of one session whose tokens are kept
MESSAGE_COST = 64  # characters that take a template as long as what it writes around a message
COMMITTED = ("stop", "length")  # how a turn ends that becomes history


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Said:
    """A request that has ended, to be gone on from."""

    tokens: "array[int]"  # prompt and output
    prompt_len: int
    number: int
    parent: int | None  # the number of the one that it went on from


class Branches:
    """The tokens of ended requests, by name: any of them can be gone on from."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.numbers = count()  # names may be used again, these are not
        self._used = time.monotonic()
        self._tokens: OrderedDict[str, _Said] = OrderedDict()
        self._running: dict[int, Branch] = {}

    @property
    def idle_s(self) -> float:
        """How long nobody has used them."""
        return 0.0 if self._running else time.monotonic() - self._used

    @property
    def is_over(self) -> bool:
        """Whether nobody has used them for too long."""
        return self.timeout_s is not None and self.idle_s > self.timeout_s

    def began(self, branch: "Branch") -> None:
        """A request is on its way."""
        self._running[branch.number] = branch

    def ended(self, branch: "Branch") -> None:
        """It has ended, however it did."""
        del self._running[branch.number]
        self._used = time.monotonic()

    def find(self, name: str, *, with_output: bool = True, may_run: bool = False) -> tuple[int, ...]:
        """Prompt and output of an ended request, or its prompt alone; of one that may run still, what it has so far."""
        said = self._said(name, may_run=may_run)
        return tuple(said.tokens if with_output else said.tokens[: said.prompt_len])

    def number_of(self, name: str, *, may_run: bool = False) -> int:
        """The number of such a request."""
        return self._said(name, may_run=may_run).number

    def keep(self, name: str, tokens: Sequence[int], branch: "Branch | None" = None) -> None:
        """A request can be gone on from; the oldest is forgotten when there are too many."""
        self._tokens.pop(name, None)  # another had this name before
        self._tokens[name] = _Said(
            tokens=array("i", tokens),
            prompt_len=len(tokens) if branch is None else branch.prompt_len,
            number=next(self.numbers) if branch is None else branch.number,
            parent=None if branch is None else branch.parent,
        )
        if len(self._tokens) > BRANCHES_MAX:
            self._tokens.popitem(last=False)

    def stop_from(self, number: int | None) -> None:
        """End a request that still runs, and all that went on from it; what it has said itself can be gone on from."""
        after = self._after(number)
        for branch in [each for each in self._running.values() if not each.is_stopped]:
            if branch.number == number:
                self.keep(branch.name, branch.tokens, branch)
            if number in (None, branch.number, branch.parent) or branch.parent in after:
                branch.stop()

    def drop_after(self, number: int | None, before: int) -> None:
        """Forget what went on from a request, or everything, as far as it began before another one."""
        after = self._after(number)
        for name in [name for name, said in self._tokens.items() if said.number in after and said.number < before]:
            del self._tokens[name]

    def _said(self, name: str, *, may_run: bool) -> _Said:
        self._used = time.monotonic()
        for branch in self._running.values() if may_run else ():
            if branch.name == name and not branch.is_stopped:
                tokens = array("i", branch.tokens)
                return _Said(tokens=tokens, prompt_len=branch.prompt_len, number=branch.number, parent=branch.parent)
        if name not in self._tokens:
            raise RequestError(400, "session_params.rid", f"no request {name[:100]!r} has ended in this session")
        return self._tokens[name]

    def _after(self, number: int | None) -> set[int]:
        """Those that went on from a request, from one that did, and so on; from none at all: every one."""
        found: set[int] = set()
        for said in sorted(self._tokens.values(), key=lambda said: said.number):  # none is older than where it began
            if number is None or said.parent == number or said.parent in found:
                found.add(said.number)
        return found


class Branch:
    """One request that others may go on from once it has ended."""

    def __init__(
        self,
        branches: Branches,
        name: str,
        prompt: tuple[int, ...],
        *,
        parent: int | None = None,
        replaces: bool = False,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self._branches = branches
        self._replaces = replaces  # everything else that went on from its parent
        self._abort = abort
        self.name = name
        self.number = next(branches.numbers)
        self.parent = parent
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.is_stopped = False

    def began(self) -> None:
        """It is on its way, nobody can go on from it yet; what it replaces ends."""
        if self._replaces:
            self._branches.stop_from(self.parent)
        self._branches.began(self)

    def saw(self, event: Event) -> None:
        """More output, or the end; what it replaces is forgotten as soon as it is not refused."""
        if self._replaces and not isinstance(event, Refused):
            self._replaces = False
            self._branches.drop_after(self.parent, self.number)
        if isinstance(event, Tokens):
            self.tokens += event.tokens
        elif isinstance(event, Finished | Refused):
            self._branches.ended(self)
            if isinstance(event, Finished) and event.reason in COMMITTED and not self.is_stopped:
                self._branches.keep(self.name, self.tokens, self)

    def stop(self) -> None:
        """End it: nobody can go on from what it says from now on."""
        self.is_stopped = True
        if self._abort is not None:
            self._abort()


class Conversation:
    """One open session as the server sees it."""

    def __init__(
        self,
        session_id: str,
        transcript: Transcript | None = None,
        usages: Sequence[Usage] = (),
        notes: dict[str, Any] | None = None,
        branches: Branches | None = None,
        client: str = "",
    ) -> None:
        self.id = session_id
        self.client = client
        self.transcript = transcript or Transcript()
        self.usages = list(usages)  # of its committed turns
        self.notes = notes or {}  # what its opener said that the engine has no place for
        self.branches = branches  # not None: each of its requests has tokens of its own, here
        self.num_closing = 0  # commands to close it that the engine has not answered
        self.holder: Hold | None = None  # a turn or a change on its way to the engine, or not yet ended there
        self.num_waiting = 0
        self.line = asyncio.Lock()  # first come, first served
        self.is_free = asyncio.Event()
        self.is_free.set()

    @property
    def key(self) -> tuple[str, str]:
        """Whose it is, and what they call it."""
        return self.client, self.id

    def check_open(self) -> None:
        """Refuse what comes too late."""
        if self.num_closing:
            raise RequestError(410, "session_id", f"session {self.id!r} is closing")

    def check_streaming(self) -> None:
        """Refuse what needs tokens of the session's own."""
        if self.branches is not None:
            raise RequestError(400, "session_id", f"session {self.id!r} is not a streaming one: only /generate has it")

    def check_number(self, number: int | None) -> None:
        """Refuse a turn that was committed already: what it cost is known while another one runs, too."""
        if number is not None and number < len(self.usages):
            reason = f"turn {number} of session {self.id!r} is committed already"
            raise RepeatedTurn(409, "turn", reason, self.usages[number])

    def rewound(self, event: Event) -> None:
        """The engine has cut it back, if it says so."""
        if isinstance(event, SessionState):
            self.transcript = self.transcript.cut(event.length, event.turns)
            del self.usages[event.turns :]

    async def is_busy(self) -> bool:
        """Whether a turn has it whose reader is still there."""
        return isinstance(self.holder, Turn) and not await self.holder.request.is_disconnected()

    async def wait_until_free(self, *, queue: bool) -> None:
        """Return when nobody has it; 409 if a turn does that nobody said to wait for."""
        while self.holder is not None:
            if not queue and await self.is_busy():
                raise _busy(self.id)
            await self.is_free.wait()
        self.check_open()


class Hold:
    """Who has a session: from before anything is sent until the engine's last word, if anything was."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.is_sent = False

    def began(self) -> None:
        """It is on its way to the engine."""
        self.is_sent = True

    def leave(self) -> None:
        """The session is free again; only who has it can say so."""
        if self.conversation.holder is self:
            self.conversation.holder = None
            self.conversation.is_free.set()


class Change(Hold):
    """A rewind or a fork of a session."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self.follow: Callable[[Event], None] = lambda event: None  # takes over here what was done there

    def saw(self, event: Event) -> None:
        """The engine has done it, or not."""
        self.follow(event)
        self.leave()


class Closing:
    """A close on its way; one that is not carried out leaves the session open."""

    def __init__(self, conversations: "Conversations", conversation: Conversation) -> None:
        self._conversations = conversations
        self._conversation = conversation

    def began(self) -> None:
        """Nothing more begins there."""
        self._conversation.num_closing += 1

    def saw(self, event: Event) -> None:
        """It is gone, closes for another, or stays."""
        self._conversation.num_closing -= 1
        if isinstance(event, SessionClosed) or (isinstance(event, Refused) and event.status == 404):
            self._conversations.forget(self._conversation)


class Turn(Hold):
    """One turn of a session, from before it is sent until its last event."""

    def __init__(self, conversation: Conversation, language: Language, request: Request) -> None:
        super().__init__(conversation)
        self._language = language
        self.request = request
        self._messages: Sequence[EscapedMessage] | None = None  # None: plain input
        self._generates = False
        self._output: list[int] = []  # the last token is what counts

    @property
    def length_before(self) -> int:
        """Tokens that the session holds before this turn."""
        return self.conversation.transcript.length

    @property
    def num_chars_before(self) -> int:
        """Characters that a template may have to render again for the session's next messages."""
        transcript = self.conversation.transcript
        return transcript.num_chars + MESSAGE_COST * transcript.num_messages

    def plain_tokens(self, tokens: tuple[int, ...], *, generates: bool) -> tuple[int, ...]:
        """The tokens of plain input, as they are."""
        self._messages, self._generates = None, generates
        return tokens

    def chat_tokens(
        self, messages: list[dict[str, Any]], *, generates: bool, tokens_max: int | None = None
    ) -> tuple[int, ...]:
        """The tokens that messages add to the session."""
        self._messages, self._generates = self._language.escape(messages), generates
        transcript = self.conversation.transcript
        return continuation(self._language, transcript, self._messages, answers=generates, tokens_max=tokens_max)

    def no_tokens(self, *, generates: bool) -> tuple[int, ...]:
        """Nothing new: the model goes on, or answers the messages that were appended."""
        transcript = self.conversation.transcript
        if transcript.is_chat and transcript.length:
            return self.chat_tokens([], generates=generates)
        return self.plain_tokens((), generates=generates)

    def saw(self, event: Event) -> None:
        """An event of it came; the last one says whether it is history now."""
        if isinstance(event, Tokens):
            self._output = [event.tokens[-1]] if event.tokens else self._output
        elif isinstance(event, Finished | Refused):
            if isinstance(event, Finished) and event.reason in COMMITTED:
                self._commit(event)
            self.leave()

    def _commit(self, finished: Finished) -> None:
        conversation = self.conversation
        conversation.transcript = conversation.transcript.add(
            self._language,
            length=finished.usage.prompt_tokens + finished.usage.completion_tokens,
            messages=self._messages,
            output=self._output if self._generates else None,
        )
        conversation.usages.append(finished.usage)


class Conversations:
    """All sessions that were opened here."""

    def __init__(self) -> None:
        self._table: dict[tuple[str, str], Conversation] = {}  # by key
        self._timed: dict[tuple[str, str], Conversation] = {}  # of those, whose time is not the engine's to tell
        self._check_at = CHECK_AT_MIN

    @property
    def are_many(self) -> bool:
        """Whether it is time to look for those that the engine has closed by itself."""
        return len(self._table) >= self._check_at

    def open(self, conversation: Conversation) -> None:
        """The engine has opened a session."""
        self._timed.pop(conversation.key, None)
        self._table[conversation.key] = conversation
        if conversation.branches is not None:
            self._timed[conversation.key] = conversation

    def find(self, session_id: str, client: str = "") -> Conversation:
        """A client's session of this name."""
        found = self._table.get((client, session_id))
        if found is None:
            raise RequestError(404, "session_id", f"there is no session {session_id[:100]!r}")
        found.check_open()
        return found

    def known(self, session_id: str, client: str = "") -> Conversation | None:
        """A client's session of this name, closing or not, if it was opened here."""
        return self._table.get((client, session_id))

    def overdue(self) -> list[Conversation]:
        """Those whose time is up, which only the server can tell."""
        return [each for each in self._timed.values() if each.branches is not None and each.branches.is_over]

    def forget(self, conversation: Conversation) -> None:
        """The engine has closed it."""
        if self._table.get(conversation.key) is conversation:
            del self._table[conversation.key]
            self._timed.pop(conversation.key, None)

    def snapshot(self) -> list[Conversation]:
        """Those that are open now, to be compared with what the engine has a moment later."""
        return list(self._table.values())

    def forget_missing(self, before: list[Conversation], open_keys: set[tuple[str, str]]) -> None:
        """Forget those that were there before the engine was asked, and that it does not have any more."""
        for conversation in before:
            if conversation.key not in open_keys:
                self.forget(conversation)
        self._check_at = max(CHECK_AT_MIN, 2 * len(self._table))  # so that opening many costs each the same

    @asynccontextmanager
    async def turn(
        self,
        request: Request,
        of: TurnOf,
        language: Language,
        *,
        timeout_s: float | None,
        waiting_max: int | None = None,
    ) -> AsyncIterator[Turn]:
        """A turn of a session, which is its own until it ends; one that is never sent ends here.

        At most `waiting_max` turns of its client wait for their sessions.
        """
        session_id, client = of.session_id, caller(request).name
        conversation = self.find(session_id, client)
        conversation.check_streaming()
        if await conversation.is_busy():
            conversation.check_number(of.number)
            if not of.queue:
                raise _busy(session_id)
            num_waiting = sum(each.num_waiting for each in self._table.values() if each.client == client)
            if waiting_max is not None and num_waiting >= waiting_max:
                raise CapacityError(429, f"{num_waiting} requests of this key wait: it may have {waiting_max}")
        if conversation.num_waiting >= WAITING_MAX:
            raise CapacityError(429, f"{WAITING_MAX} turns wait for session {session_id!r} already")
        turn = Turn(conversation, language, request)
        try:
            await self._wait(request, conversation, turn, queue=of.queue, timeout_s=timeout_s)
            yield turn
        finally:
            if not turn.is_sent:
                turn.leave()

    async def _wait(
        self, request: Request, conversation: Conversation, turn: Turn, *, queue: bool, timeout_s: float | None
    ) -> None:
        """Take a session for a turn as soon as it is free, its client there and its time not up."""
        conversation.num_waiting += 1
        try:
            await while_connected(request, _take(conversation, turn, queue=queue), timeout_s)
        except TimeoutError as error:
            reason = f"session {conversation.id!r} was not free within {timeout_s:g} s"
            raise RequestError(504, "timeout", reason) from error
        finally:
            conversation.num_waiting -= 1

    @asynccontextmanager
    async def held(self, request: Request, session_id: str, *, within_s: float) -> AsyncIterator[Change]:
        """A session that no turn has and none gets until what is sent meanwhile was answered; 503 if it is not free."""
        conversation = self.find(session_id, caller(request).name)
        conversation.check_streaming()
        if await conversation.is_busy():
            raise _busy(session_id)
        change = Change(conversation)
        try:
            try:
                await while_connected(request, _take(conversation, change, queue=False), within_s)
            except TimeoutError as error:
                raise CapacityError(503, f"session {session_id!r} was not free within {within_s:g} s") from error
            yield change
        finally:
            if not change.is_sent:
                change.leave()


async def _take(conversation: Conversation, holder: Hold, *, queue: bool) -> None:
    async with conversation.line:
        await conversation.wait_until_free(queue=queue)
        conversation.holder = holder
        conversation.is_free.clear()


def _busy(session_id: str) -> RequestError:
    return RequestError(409, "session_id", f"session {session_id!r} has a turn that has not ended (queue: true waits)")
