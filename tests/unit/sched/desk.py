"""Desk: an engine over the witness with small, plain options, and a client that keeps what it is told."""

from dataclasses import dataclass, field, replace

from roost.clock import VirtualClock
from roost.config import EngineConfig, MemoryConfig, ModelTraits, Resolved, SchedConfig, resolve
from roost.messages import Command, Event
from roost.sched.engine import Engine
from roost.step import Executor
from tests.sim.model import Model
from tests.sim.witness import Witness

VOCAB = 50


def resolved(**sched: int | bool) -> Resolved:
    """A small configuration: page 4, 40 pages, context 64."""
    memory = MemoryConfig(page_size=4, pool_tokens=41 * 4, strict_memory=2)
    base = SchedConfig(context=64, max_running=3, max_queued=4, chunk=16)
    config = EngineConfig(memory=memory, sched=replace(base, **sched))  # type: ignore[arg-type]
    return resolve(config, ModelTraits(vocab_size=VOCAB))


def witness(options: Resolved) -> Witness:
    """A device that runs as late as it can and never breaks."""
    model = Model(vocab=VOCAB, window_1=None, window_2=None, draft_skill=0)
    return Witness(options, model, (0, 0), lambda what: False)


@dataclass(slots=True)
class Desk:
    """An engine and what came back from it."""

    engine: Engine
    events: list[Event] = field(default_factory=list)

    def send(self, command: Command) -> list[Event]:
        """Post a command, run one tick, and return what it was answered with so far."""
        answer: list[Event] = []

        def reply(event: Event) -> None:
            answer.append(event)
            self.events.append(event)

        self.engine.post(command, reply)
        self.engine.tick()
        return answer

    def run(self) -> None:
        """Tick until everything has ended."""
        for _ in range(1000):
            if not self.engine.has_work:
                return
            self.engine.tick()
        raise AssertionError("the engine does not come to rest")


def desk(executor: Executor | None = None, **sched: int | bool) -> Desk:
    """A desk with some options changed."""
    options = resolved(**sched)
    return Desk(Engine(options, executor or witness(options), VirtualClock()))
