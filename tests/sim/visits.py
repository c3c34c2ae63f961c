"""Visits: session commands of simulated clients, and the answers that they must get.

Clients open, close, rewind, fork and describe sessions, also beside a turn that runs, number their turns, send some
twice, and let time pass. Each
answer is predicted from what happened before; the engine is read only for what is shared through the prefix tree. Some
commands are read too late: they must be refused and change nothing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from roost.clients import scoped
from roost.clock import VirtualClock
from roost.messages import (
    CloseSession,
    Command,
    Event,
    FlushCache,
    ForkSession,
    GetSession,
    GetSessions,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    SessionStates,
    Submit,
)
from roost.sched.engine import Engine
from tests.sim.checker import Ask, Broken, Checker, Conversation
from tests.sim.rules import Rules

MS = 1_000_000
TICK_NS = MS
LATE = 0.1  # probability per tick of a command that is read too late
Refusal = tuple[int, str]  # status, parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probability per tick of each command; share of the sessions, or turns, with each option."""

    rewind: float = 0
    fork: float = 0
    look: float = 0
    jump: float = 0
    ttl: float = 0
    max_tokens: float = 0
    numbered: float = 0
    salted: float = 0
    branch: float = 0  # forks at a turn or a length, whoever has the session
    shares: float = 0


def draw_habits(rng: random.Random) -> Habits:
    """The habits of a seed's clients; in half of the seeds they send turns only."""
    if rng.random() < 0.5:
        return Habits()
    return Habits(
        rewind=rng.choice([0.1, 0.5]),
        fork=rng.choice([0, 0.1, 0.4]),
        look=rng.choice([0.1, 0.5]),
        jump=rng.choice([0, 0, 0.05]),
        ttl=rng.choice([0, 0, 0.5, 1]),
        max_tokens=rng.choice([0, 0.5]),
        numbered=rng.choice([0, 0.5]),
        salted=rng.choice([0, 0.15]),
    )


def with_branches(seed: int, habits: Habits) -> Habits:
    """In some seeds clients go on from earlier points of their sessions, too."""
    rng = random.Random(f"branches {seed}")  # a generator of its own, so that the other seeds stay the same
    if rng.random() < 0.8:
        return habits
    return replace(habits, branch=rng.choice([0.2, 0.5]), shares=rng.choice([0, 0.5, 1]))


class Visits:
    """All visits of one run."""

    def __init__(
        self, seed: int, habits: Habits, engine: Engine, checker: Checker, rules: Rules, clock: VirtualClock
    ) -> None:
        self._rng = random.Random(
            f"visits {seed}"
        )  # a generator of its own, so that seeds without visits stay the same
        self._salting = random.Random(f"salting {seed}")  # a generator of its own, for the same reason
        self._late = random.Random(f"late {seed}")
        self._habits, self._engine, self._checker, self._rules, self._clock = habits, engine, checker, rules, clock
        self._owning = random.Random(f"owning {seed}")
        self._branching = random.Random(f"branching {seed}")
        self._gone = Conversation(id="nobody")  # the last session that went away
        self._due: set[str] = set()  # whose time is up in this tick
        self.broken: AssertionError | None = None  # the engine shields itself from clients that raise
        self.counts: dict[str, int] = {}

    def post(self, command: Command, check: Callable[[Event], None]) -> None:
        """Send a command whose answer must pass a check; it is read at the last moment at which it may be."""

        def reply(event: Event) -> None:
            try:
                check(event)
            except AssertionError as broken:
                self.broken = self.broken or broken

        self._engine.post(command, reply, self._clock.now_ns() + TICK_NS)

    def _post_late(self, command: Command) -> None:
        """Send a command that is read one moment too late."""

        def reply(event: Event) -> None:
            if not (isinstance(event, Refused) and event.status == 503):
                self.broken = self.broken or Broken(f"late: {command} was answered with {event}")

        self.count("late")
        self._engine.post(command, reply, self._clock.now_ns() + TICK_NS - 1)

    def count(self, what: str) -> None:
        """One more of something."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # --- opening and closing -----------------------------------------------------------------------------------

    def open(self, name: str, cache_salt: str) -> None:
        """Open a session; it is refused when there are as many as there may be."""
        rng, limits = self._rng, self._engine.state.resolved.session
        most = limits.max_session_tokens
        own = rng.randint(8, most or self._engine.state.resolved.context)
        clients = list(self._engine.state.resolved.clients)
        client = self._owning.choice(clients) if clients else ""
        conversation = Conversation(
            id=scoped(client, name),
            client=client,
            cache_salt=cache_salt,
            ttl_ms=rng.choice([1, 5, 20, 60]) if rng.random() < self._habits.ttl else None,
            max_tokens=own if rng.random() < self._habits.max_tokens else None,
            shares=self._branching.random() < self._habits.shares,
        )
        command = OpenSession(
            session_id=name,
            cache_salt=cache_salt,
            ttl_ms=conversation.ttl_ms,
            max_tokens=conversation.max_tokens,
            shares=conversation.shares,
            client=client,
        )
        conversation.max_tokens = most if conversation.max_tokens is None else conversation.max_tokens
        self._checker.conversations[conversation.id] = conversation

        def check(event: Event) -> None:
            self._expect(command, event, self._full(client))
            del self._checker.conversations[conversation.id]
            if isinstance(event, Refused):
                conversation.closing = True
                return
            self._checker.conversations[conversation.id] = conversation  # in the order they were opened
            conversation.opened, conversation.last_used = True, self._checker.now
            self.count("opened")
            self._check_state(conversation, event)

        self.post(command, check)

    def close(self, conversation: Conversation) -> None:
        """Close a session, unless it goes by itself in the same tick."""
        conversation.closing = True
        command = CloseSession(session_id=conversation.name, client=conversation.client)

        def check(event: Event) -> None:
            if conversation.expired:
                self._expect(command, event, (404, "session_id"))
                return
            assert isinstance(event, SessionClosed), event
            self.count("closed")
            self._gone = conversation
            self._checker.closed(conversation)

        self.post(command, check)

    # --- visits ------------------------------------------------------------------------------------------------

    def number(self, submit: Submit) -> Submit:
        """A turn with a number: mostly the next, sometimes one that was, or is not yet due."""
        conversation = self._checker.conversation_of(submit)
        if conversation is None or self._rng.random() >= self._habits.numbered:
            return submit
        right = len(conversation.turns)
        return replace(submit, turn=self._rng.choice([right, right, right, self._rng.randint(0, right), right + 1]))

    def salt(self, submit: Submit) -> Submit:
        """A turn that names its session's salt, or one that is not."""
        conversation, rng = self._checker.conversation_of(submit), self._salting
        if conversation is None or rng.random() >= self._habits.salted:
            return submit
        return replace(submit, cache_salt=rng.choice([conversation.cache_salt, "salt", "other"]))

    def jump(self) -> None:
        """Let time pass."""
        if self._rng.random() < self._habits.jump:
            self.count("jump")
            self._clock.advance(self._rng.choice([4, 20, 70]) * MS)

    def visit(self, num_sessions: int, fresh: Callable[[str], str]) -> None:
        """What clients do with their sessions before one tick."""
        rng, habits = self._rng, self._habits
        talks = [each for each in self._checker.conversations.values() if each.opened]
        idle = [each for each in talks if not each.num_open_turns and each.tokens]
        if talks and rng.random() < habits.rewind:
            self._rewind(rng.choice(idle if idle and rng.random() < 0.8 else talks))
        if talks and rng.random() < habits.fork:
            same = rng.random() < 0.1 or len(talks) > num_sessions + 2
            source = rng.choice(idle if idle and rng.random() < 0.8 else talks)
            other = rng.choice(talks) if same else None  # a name that comes free in this tick would be two sessions'
            self._fork(source, fresh("s") if other is None or other.ttl_ms is not None else other.name)
        if talks and self._branching.random() < habits.branch:
            self._branch(self._branching.choice(talks), num_sessions + 2 - len(talks), fresh)
        if rng.random() < habits.look:
            self._look(rng.choice(talks) if talks else None)
        if self._late.random() < LATE:
            self._post_late(self._late.choice(_commands(self._late.choice(talks or [self._gone]))))

    def _rewind(self, conversation: Conversation) -> None:
        rng, length, num_turns = self._rng, len(conversation.tokens), len(conversation.turns)
        command = RewindSession(session_id=conversation.name, client=conversation.client)
        if rng.random() < 0.5:
            command = replace(command, turn=rng.choice([*range(num_turns + 1), max(0, num_turns - 1), num_turns + 1]))
        if command.turn is None or rng.random() < 0.05:
            near = max(0, length - rng.randint(0, 5))
            command = replace(command, length=rng.choice([near, near, rng.randint(0, length), length + 1, -1]))
        busy = self._busy(conversation)

        def check(event: Event) -> None:
            self._expect(command, event, busy() or _bad_point(conversation, command.turn, command.length))
            if isinstance(event, Refused):
                return
            target, kept = _point(conversation, command.turn, command.length)
            self.count("rewound")
            self._rules.rewound(conversation.id, target)
            self._checker.rewound(conversation, target, kept)
            self._check_state(conversation, event)

        self.post(command, check)

    def _branch(self, conversation: Conversation, num_left: int, fresh: Callable[[str], str]) -> None:
        """Fork a session at a turn or a length, mostly one that it has."""
        rng, num_turns, length = self._branching, len(conversation.turns), len(conversation.tokens)
        turn = rng.choice([num_turns, rng.randint(0, num_turns), rng.randint(-1, num_turns + 1)])
        at = rng.choice([length, rng.randint(0, length), rng.randint(-1, length + 1)])
        kind, name = rng.random(), fresh("s") if num_left > 0 else conversation.name
        self._fork(conversation, name, turn if kind < 0.55 else None, at if kind > 0.5 else None)

    def _fork(self, conversation: Conversation, name: str, turn: int | None = None, length: int | None = None) -> None:
        client, new_id = conversation.client, scoped(conversation.client, name)
        command = ForkSession(session_id=conversation.name, new_id=name, turn=turn, length=length, client=client)
        is_whole = turn is None and length is None
        gone = self._busy(conversation) if is_whole else self._gone_since(conversation)

        def check(event: Event) -> None:
            taken = new_id in [each.id for each in self._checker.conversations.values() if each.opened]
            bad = None if is_whole else _bad_point(conversation, turn, length)
            self._expect(command, event, gone() or bad or ((409, "new_id") if taken else None) or self._full(client))
            if isinstance(event, Refused):
                return
            end, kept = _point(conversation, turn, length)
            fork = self._checker.forked(conversation, new_id, end, kept)
            self._checker.conversations[new_id] = fork
            self._checker.reopened(fork)
            self.count("opened")
            self.count(
                "forked" if is_whole else "branched beside a turn" if self._is_held(conversation) else "branched"
            )
            self._rules.forked(conversation.id, new_id, end)
            self._check_state(fork, event)

        self.post(command, check)

    def _is_held(self, conversation: Conversation) -> bool:
        return self._engine.state.sessions.table[conversation.id].turn is not None

    def _look(self, conversation: Conversation | None) -> None:
        """Ask for one session, one that is gone, or all of them."""
        if self._rng.random() < 0.2:
            client = self._owning.choice([None, *self._engine.state.resolved.clients])
            self.post(GetSessions(client=client), lambda event: self._check_states(event, client))
            return
        gone = conversation is None or self._rng.random() < 0.1
        asked = self._gone if conversation is None or gone else conversation
        command = GetSession(session_id=asked.name, client=asked.client)

        def check(event: Event) -> None:
            known = self._checker.conversations.get(asked.id)
            self._expect(command, event, (404, "session_id") if known is None else None)
            if known is not None:
                self._check_state(known, event)

        self.post(command, check)

    # --- what they are told ------------------------------------------------------------------------------------

    def _busy(self, conversation: Conversation) -> Callable[[], Refusal | None]:
        """Why a session cannot be changed by a command that is sent now, asked when it is answered."""
        asks: list[Ask] = [ask for ask in self._checker.asks.values() if ask.conversation is conversation]
        before, gone = [ask for ask in asks if not ask.ended], self._gone_since(conversation)
        return lambda: gone() or ((409, "session_id") if any(not ask.ended for ask in before) else None)

    def _gone_since(self, conversation: Conversation) -> Callable[[], Refusal | None]:
        """Why a session that a command names now is not there for it, asked when it is answered."""
        closing = conversation.closing

        def refusal() -> Refusal | None:
            if self._checker.conversations.get(conversation.id) is not conversation:
                return 404, "session_id"
            return (410, "session_id") if closing else None

        return refusal

    def _full(self, client: str) -> Refusal | None:
        resolved, talks = self._engine.state.resolved, self._checker.conversations.values()
        own = resolved.clients[client].sessions if client in resolved.clients else None
        is_full = sum(each.opened for each in talks) >= resolved.session.max_sessions
        is_full |= own is not None and sum(each.opened and each.client == client for each in talks) >= own
        return (429, "") if is_full else None

    def _expect(self, command: Command, event: Event, refusal: Refusal | None) -> None:
        told = (event.status, event.param) if isinstance(event, Refused) else None
        if told != refusal:
            raise Broken(f"visit: {command} was answered with {event}, expected {refusal}")

    def _check_states(self, event: Event, client: str | None) -> None:
        assert isinstance(event, SessionStates), event
        talks = [each for each in self._checker.conversations.values() if each.opened]
        known = [each for each in talks if client in (None, each.client)]
        if [each.session_id for each in event.sessions] != [each.name for each in known]:
            raise Broken(f"state: {event}, but these are open: {[each.id for each in known]}")
        for conversation, state in zip(known, event.sessions, strict=True):
            self._check_state(conversation, state)

    def _check_state(self, conversation: Conversation, event: Event) -> None:
        """What a session is said to be is what its turns have made of it."""
        assert isinstance(event, SessionState), event
        self.count("looked at")
        asks = [ask for ask in self._checker.asks.values() if ask.conversation is conversation and not ask.ended]
        fixed = (event.session_id, event.client, event.ttl_ms, event.max_tokens, event.cache_salt, event.turns)
        names = (conversation.name, conversation.client)
        known = (*names, conversation.ttl_ms, conversation.max_tokens, conversation.cache_salt)
        idle = event.state == "idle"
        good = fixed == (*known, len(conversation.turns)) and (idle or bool(asks))
        good = good and (event.state != "closing" or conversation.closing)
        if idle:
            good = good and event.length == len(conversation.tokens)
            good = good and event.idle_ms == (self._checker.now - conversation.last_used) // MS
            low, high = conversation.cached if conversation.cached is not None else (0, event.length)
            good = good and (event.resident == low if low == high else 0 <= event.resident <= event.length)
        else:
            good = good and event.length >= len(conversation.tokens) and event.idle_ms == 0
        if not good:
            raise Broken(f"state: {event} of {conversation}, {len(asks)} turns have not ended")

    # --- time --------------------------------------------------------------------------------------------------

    def before_tick(self) -> None:
        """Predict which sessions expire now: no turn holds them, and the last one ended long enough ago."""
        fresh = [ask.conversation for ask in self._checker.fresh]
        for conversation in list(self._checker.conversations.values()):
            taken = conversation.num_open_turns - sum(each is conversation for each in fresh)
            if conversation.ttl_ms is None or not conversation.opened or taken:
                continue
            if self._checker.now - conversation.last_used >= conversation.ttl_ms * MS:
                self._due.add(conversation.id)
                conversation.closing = conversation.expired = True
                del self._checker.conversations[conversation.id]
                self._gone = conversation
                self.count("expired")

    def expired(self, session_id: str) -> None:
        """The engine closes a session because its time is up."""
        if session_id not in self._due:
            raise Broken(f"ttl: {session_id} is closed before its time")

    def after_tick(self) -> None:
        """The engine's sessions are those that were opened and have not gone."""
        self._checker.fresh.clear()
        self._due.clear()
        table = set(self._engine.state.sessions.table)
        if table != set(self._checker.conversations):
            raise Broken(f"ttl: {table ^ set(self._checker.conversations)} are open on one side only")


def _bad_point(conversation: Conversation, turn: int | None, length: int | None) -> Refusal | None:
    """What is wrong with a point of a session; a turn that has not ended adds nothing to it."""
    if turn is not None and length is not None:
        return 400, "turn"
    if turn is not None and not 0 <= turn <= len(conversation.turns):
        return 400, "turn"
    return (400, "length") if length is not None and not 0 <= length <= len(conversation.tokens) else None


def _point(conversation: Conversation, turn: int | None, length: int | None) -> tuple[int, int]:
    """Tokens and turns of a session up to a point, its present end if none is given."""
    ends = [end for end, _ in conversation.turns]
    if turn is not None:
        return ends[turn - 1] if turn else 0, turn
    end = len(conversation.tokens) if length is None else length
    return end, sum(each <= end for each in ends)


def _commands(conversation: Conversation) -> list[Command]:
    """A command that would change something if it were read in time."""
    name, client = conversation.name, conversation.client
    return [
        OpenSession(session_id="late", client=client),
        ForkSession(session_id=name, new_id="late", client=client),
        RewindSession(session_id=name, turn=0, client=client),
        CloseSession(session_id=name, client=client),
        FlushCache(),
        Submit(request_id="late", tokens=(0,), session_id=name, client=client),
    ]
