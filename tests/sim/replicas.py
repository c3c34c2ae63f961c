"""Replicas: several engines with one journal behind a router, from a seed to a verdict.

Real schedulers on witnesses, the real journal in memory, the real placement. Replicas fall, also in the middle of a
write, are restarted under the same name or another, are stopped for a while and come back, drain; the router forgets.
Between two operations of one replica's journal another may act. Each command ends once; what clients are told must be
explained by one history of each session (`tests.sim.histories`).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from roost.clock import VirtualClock
from roost.config.options import SessionConfig
from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    ForkSession,
    GetSession,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    Submit,
    Tokens,
)
from roost.obs.trace import Note, Trace
from roost.router.placement import Placement, Wanted, key_of
from roost.sched.engine import Engine
from roost.session.journal import SessionJournal, key_of_session
from tests.sim.checker import Broken
from tests.sim.histories import Histories, Known
from tests.sim.options import Options, draw
from tests.sim.replica_faults import NO_FAULTS, Fallen, SharedLogs, draw_faults
from tests.sim.report import Report
from tests.sim.visits import TICK_NS
from tests.sim.witness import Witness

ROUNDS = 50
CALM_ROUNDS_MAX = 2000
SHARE = 0.4  # of the seeds: in these, replicas run after the one engine
READ_WITHIN_NS = 3 * TICK_NS


@dataclass(slots=True, eq=False)
class Sent:
    """A command that a client has sent."""

    command: Command
    replica: "Replica"
    output: list[int] = field(default_factory=list)
    ended: bool = False  # the engine has ended it, or has fallen
    is_waited_for: bool = True  # False: the router has answered 503 in the engine's place


@dataclass(slots=True, eq=False)
class Replica:
    """One engine."""

    name: str
    engine: Engine
    stopped_until: int = 0  # a round
    is_given_up: bool = False  # stopped for so long that the router has noticed
    drains: bool = False
    is_acting: bool = False
    began_at: int = 0  # how often others had acted between two operations, when it began to act


class Fleet:
    """One run."""

    def __init__(self, options: Options, log: Callable[[str], None] | None = None) -> None:
        self.options, self._log = options, log
        self.rng = random.Random(f"replicas {options.seed}")
        self.faults = draw_faults(options.seed)
        faults = self.faults
        self._may_stay = not any((faults.fall, faults.fall_in_operation, faults.stop, faults.drain, faults.full))
        self.troubled = True
        self.clock = VirtualClock()
        self._resolved = replace(options.resolved, session=SessionConfig(), clients={})
        self.histories = Histories(options.model)
        self.logs = SharedLogs(self.clock, self._written)
        self.logs.before, self.logs.fate = self._between, self._fate
        self.placement = Placement()
        self.report = Report(seed=options.seed)
        self.sent: list[Sent] = []
        self.replicas: list[Replica] = []
        self._names: dict[str, str] = {}  # of sessions, by key
        self._numbered = 0
        self._num_between = 0
        self._broken: AssertionError | None = None
        for _ in range(self.rng.choice([1, 2, 2, 3])):
            self._start(self._fresh("replica"))
        self._route()

    # --- replicas ------------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        witness = Witness(self._resolved, self.options.model, self.options.layer_books, lambda what: False)
        first = random.Random(f"epochs {self.options.seed} {self._numbered}")
        journal = SessionJournal(self.logs, first_epoch=lambda: first.getrandbits(40))
        engine = Engine(self._resolved, witness, self.clock, Trace(self._note), journal=journal)
        self.replicas.append(Replica(name, engine))
        self._say(f"{name} starts")

    def _note(self, note: Note) -> None:
        kind, subject, numbers = note
        self._count("note: " + kind)
        self._say(f"  {kind} {subject} {numbers}")
        if kind in ("lost_client", "broken_command"):
            raise Broken(f"crash: {subject}")
        if kind == "take_over" and self._may_stay:
            raise Broken(f"placement: {subject} moves, and nobody has fallen")

    def _route(self) -> None:
        """What the router knows of who takes requests."""
        self.placement.update(each.name for each in self.replicas if not (each.is_given_up or each.drains))

    def _fall(self, replica: Replica) -> None:
        """A replica is gone, with all it had; the router answers in its place."""
        self._count("fault: fall")
        self._say(f"{replica.name} falls")
        self.replicas.remove(replica)
        for sent in self.sent:
            if sent.replica is replica:
                sent.ended, sent.is_waited_for = True, False
        self.sent = [sent for sent in self.sent if not sent.ended]
        is_same = self.rng.random() < 0.4
        self.placement.update(each.name for each in self.replicas if not (each.is_given_up or each.drains))
        self._start(replica.name if is_same else self._fresh("replica"))
        self._route()

    def _stop(self, replica: Replica, round_number: int) -> None:
        """A replica does nothing for some time; clients whose requests it has are told that it is gone."""
        self._count("fault: stop")
        self._say(f"{replica.name} stops")
        replica.stopped_until, replica.is_given_up = round_number + self.rng.randint(2, 12), True
        for sent in self.sent:
            if sent.replica is replica and sent.is_waited_for:
                sent.is_waited_for = False
                if isinstance(sent.command, Submit) and self.rng.random() < 0.3:
                    replica.engine.post(Abort(request_id=sent.command.request_id), lambda event: None)
        self._route()

    def _come_back(self, replica: Replica) -> None:
        replica.is_given_up = False
        self._say(f"{replica.name} comes back")
        self._route()
        held = [key_of("session", "", name) for name in replica.engine.state.sessions.table]
        self.placement.report(replica.name, held)

    def _trouble(self, round_number: int) -> None:
        rng, faults = self.rng, self.faults
        for replica in list(self.replicas):
            if replica.is_given_up and round_number >= replica.stopped_until:
                self._come_back(replica)
            elif replica.drains and not replica.engine.has_work:
                self._say(f"{replica.name} has drained")
                self._start(self._fresh("replica"))
                self.replicas.remove(replica)
                self._route()
        steady = [each for each in self.replicas if not (each.is_given_up or each.drains)]
        if steady and rng.random() < faults.fall:
            self._fall(rng.choice(self.replicas))
        elif len(steady) > 1 and rng.random() < faults.stop:
            self._stop(rng.choice(steady), round_number)
        elif len(steady) > 1 and rng.random() < faults.drain:
            self._count("fault: drain")
            drained = rng.choice(steady)
            drained.drains = True
            drained.engine.stop()
            self._route()
        if rng.random() < faults.forget:
            self._count("fault: forget")
            self.placement = Placement()
            self._route()
            for replica in self.replicas:
                held = [key_of("session", "", name) for name in replica.engine.state.sessions.table]
                self.placement.report(replica.name, held)

    def _tick(self, replica: Replica) -> None:
        self.clock.advance(1)  # no step takes no time at all
        replica.is_acting, replica.began_at = True, self._num_between
        try:
            replica.engine.tick()
        except Fallen:
            self._fall(replica)
        finally:
            replica.is_acting = False

    # --- the journal ---------------------------------------------------------------------------------------------

    def _written(self, key: str, epoch: int, data: bytes) -> None:
        is_newest = max(self.logs.logs[key]) == epoch
        self.histories.written(self._names[key], data, is_newest=is_newest)

    def _between(self, operation: str) -> None:
        """Between two operations of one replica: others may act, also those that were given up, and it may fall."""
        if not self.troubled:
            return
        idle = [each for each in self.replicas if not each.is_acting]
        if len(idle) < len(self.replicas) and idle and self.rng.random() < self.faults.between:
            self._count("between two operations")
            self._num_between += 1
            other = self.rng.choice(idle)
            for _ in range(self.rng.choice([1, 1, 3, 8])):
                if other in self.replicas:
                    self._tick(other)
        if self.rng.random() < self.faults.fall_in_operation:
            self._count("fault: fall in an operation")
            raise Fallen

    def _fate(self) -> str:
        if not self.troubled:
            return ""
        if self.rng.random() < self.faults.fall_in_operation:
            return self.rng.choice(["torn", "after"])
        return "full" if self.rng.random() < self.faults.full else ""

    # --- clients -------------------------------------------------------------------------------------------------

    def _clients(self) -> None:
        busy = {_session_of(sent.command) for sent in self.sent if sent.is_waited_for}
        for number in range(3):
            name = f"s{number}"
            self._meet(name)
            if name not in busy and self.rng.random() < 0.5:
                self._send(self._next(name))
        for name in list(self.histories.sessions):
            if name.startswith("fork") and name not in busy and self.rng.random() < 0.2:
                self._send(self._next(name))
        if self.rng.random() < 0.2:
            tokens = tuple(self._token() for _ in range(self.rng.randint(1, 6)))
            self._send(Submit(request_id=self._fresh("r"), tokens=tokens, max_new_tokens=self.rng.randint(1, 5)))

    def _meet(self, name: str) -> Known:
        self._names[key_of_session(name)] = name
        return self.histories.sessions.setdefault(name, Known())

    def _next(self, name: str) -> Command:
        """What a client does next with a session."""
        rng, known = self.rng, self.histories.sessions[name]
        if not known.open:
            return OpenSession(session_id=name)
        history = rng.choice(known.open)
        act, context = rng.random(), self._resolved.context
        if len(history.tokens) > 0.7 * context or act < 0.04:
            return CloseSession(session_id=name)
        if act < 0.1:
            return RewindSession(session_id=name, turn=rng.randint(0, len(history.ends)))
        if act < 0.2:
            return GetSession(session_id=name)
        if act < 0.25 and len(self.histories.sessions) < 6:
            fork = self._fresh("fork")
            self._meet(fork).forked_from = name
            return ForkSession(session_id=name, new_id=fork)
        return Submit(
            request_id=self._fresh("r"),
            session_id=name,
            tokens=tuple(self._token() for _ in range(rng.randint(1, 4))),
            max_new_tokens=rng.choice([0, 1, 2, 5, 9]),
            turn=len(history.ends) if rng.random() < 0.5 else None,
            known_len=len(history.tokens) if rng.random() < 0.3 else None,
            queue=rng.random() < 0.3,
        )

    def _send(self, command: Command) -> None:
        name = _session_of(command)
        keys = () if name is None else (key_of("session", "", name),)
        if not self.placement.replicas:
            return  # the router answers 503
        loads = {each.name: sum(sent.replica is each for sent in self.sent) for each in self.replicas}
        chosen = self.placement.choose(Wanted(keys=keys), loads)
        replica = next(each for each in self.replicas if each.name == chosen)
        if isinstance(command, ForkSession):
            self.placement.learn(chosen, [key_of("session", "", command.new_id)])
        sent = Sent(command, replica)
        self.sent.append(sent)
        self.report.requests += 1
        self._say(f"{chosen} gets {command}")
        by = None if isinstance(command, Submit) else self.clock.now_ns() + READ_WITHIN_NS
        replica.engine.post(command, lambda event: self._deliver(sent, event), by)

    def _deliver(self, sent: Sent, event: Event) -> None:
        self._say(f"    {sent.replica.name} -> {event}")
        try:
            self._check(sent, event)
        except AssertionError as broken:  # the engine shields itself from clients that raise
            self._broken = self._broken or broken

    def _check(self, sent: Sent, event: Event) -> None:
        command, name = sent.command, _session_of(sent.command)
        if sent.ended:
            raise Broken(f"terminal: {command} had ended when it got {event}")
        if isinstance(event, Tokens):
            sent.output += event.tokens
        is_last = not isinstance(command, Submit) or isinstance(event, Finished | Refused)
        if not is_last:
            return
        sent.ended = True
        if isinstance(event, Refused):
            self._count(f"refused {event.status}")
            self._check_refused(sent, command, name, event)
        elif isinstance(command, Submit):
            assert isinstance(event, Finished), event
            self._check_finished(sent, command, event)
        elif isinstance(event, SessionClosed):
            assert name is not None
            self.histories.gone(name, event, is_last=self._is_alone(sent))
        elif isinstance(event, SessionState) and name is not None:
            self._check_state(sent, event)

    def _check_finished(self, sent: Sent, command: Submit, event: Finished) -> None:
        self._count("ended: " + event.reason)
        if event.reason == "error":
            raise Broken(f"cause: {command} ended with {event}")
        if command.session_id is None:
            self.histories.check_output(command.request_id, sent.output, list(command.tokens), event)
        elif event.reason == "length":
            self._check_owner(sent, command.session_id, event)
            prompt_len = event.usage.prompt_tokens
            self.histories.committed(command.session_id, command.tokens, sent.output, prompt_len, event)

    def _is_alone(self, sent: Sent) -> bool:
        """Whether nobody acted since the replica began to: else its answer may be that of a moment ago."""
        return sent.replica.began_at == self._num_between

    def _check_owner(self, sent: Sent, name: str, what: Event) -> None:
        """Whoever acknowledges something has the newest log."""
        log = sent.replica.engine.state.sessions.table[name].log
        newest = max(self.logs.logs.get(key_of_session(name), {}), default=None)
        if log is None or log.epoch != newest:
            raise Broken(f"owner: {sent.replica.name} says {what} with {log}, the newest epoch is {newest}")

    def _check_state(self, sent: Sent, event: SessionState) -> None:
        if event.state != "idle" or not (self._is_alone(sent) or isinstance(sent.command, RewindSession)):
            return  # its turn may end before this one is told to anybody
        self._check_owner(sent, event.session_id, event)
        if isinstance(sent.command, OpenSession | ForkSession):
            self._count("opened")
        self.histories.described(event.session_id, event.length, event.turns, event)

    def _check_refused(self, sent: Sent, command: Command, name: str | None, event: Refused) -> None:
        """A refusal says something about a session, too."""
        if event.status not in (404, 409, 410, 413, 429, 503, 400):
            raise Broken(f"refusal: {command} got {event}")
        if name is None or isinstance(command, OpenSession):
            return
        if event.status == 404 and self._is_alone(sent):
            self.histories.gone(name, event)
        elif event.usage is not None and self._is_alone(sent):
            assert isinstance(command, Submit) and command.turn is not None
            self.histories.taken(name, command.turn, event)
        if isinstance(command, Submit) and event.status in (400, 413) and event.param not in ("tokens",):
            raise Broken(f"refusal: {command} got {event}")

    # --- time ----------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> None:
        self.clock.advance(TICK_NS)
        self._say(f"round {number}")
        self._trouble(number)
        order = list(self.replicas)
        self.rng.shuffle(order)
        for replica in order:
            if replica in self.replicas and not replica.is_given_up:
                self._tick(replica)
                self.report.ticks += 1
        self.sent = [sent for sent in self.sent if not sent.ended]
        if self._broken is not None:
            raise self._broken

    def run(self) -> Report:
        """Run with faults, then without; then every session goes on once more, and is closed."""
        try:
            for number in range(ROUNDS):
                self._clients()
                self._round(number)
            self.troubled = False
            self.faults = NO_FAULTS
            self._calm_down()
            for ask in (self._last_turn, lambda name: CloseSession(session_id=name)):
                for name, known in list(self.histories.sessions.items()):
                    if known.open:
                        self._send(ask(name))
                self._calm_down()
            self.logs.before = lambda operation: None
            for name in self.histories.sessions:  # of one that was never opened a beginning may be left
                if SessionJournal(self.logs).take_over(name) is not None:
                    raise Broken(f"journal: {name} was closed")
            if self.logs.logs:
                raise Broken(f"journal: {self.logs.logs} is left behind")
        except Exception as error:  # noqa: BLE001 (a crash is a verdict too)
            self.report.failure = f"{type(error).__name__}: {error}"
        self.report.tokens = self.histories.num_tokens
        return self.report

    def _last_turn(self, name: str) -> Command:
        return Submit(request_id=self._fresh("r"), session_id=name, tokens=(0,), max_new_tokens=1)

    def _calm_down(self) -> None:
        for number in range(ROUNDS, ROUNDS + CALM_ROUNDS_MAX):
            if not self.sent and not any(each.engine.has_work for each in self.replicas):
                return
            self._round(number)
        raise Broken(f"liveness: {[sent.command for sent in self.sent]} do not end")

    def _token(self) -> int:
        return self.rng.randrange(self.options.model.vocab)

    def _fresh(self, kind: str) -> str:
        self._numbered += 1
        return f"{kind}{self._numbered}"

    def _count(self, what: str) -> None:
        self.report.counts[what] = self.report.counts.get(what, 0) + 1

    def _say(self, line: str) -> None:
        if self._log is not None:
            self._log(line)


def _session_of(command: Command) -> str | None:
    """The session that a command names, if any."""
    if isinstance(command, OpenSession | CloseSession | RewindSession | ForkSession | GetSession | Submit):
        return command.session_id
    return None


def has_fleet(seed: int) -> bool:
    """Whether replicas are run with a seed that nobody asks for them."""
    return random.Random(f"fleet {seed}").random() < SHARE


def run_fleet(seed: int, log: Callable[[str], None] | None = None) -> Report:
    """Run the replicas of one seed to their verdict."""
    return Fleet(draw(seed), log).run()
