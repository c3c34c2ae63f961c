"""EngineClientDouble: an engine over the witness with small, plain options, and a client that keeps what it is told.

Stop strings are token ids written as text (tests.sim.wishes). Time stands still unless a test moves it.
"""

from dataclasses import dataclass, field, replace

from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SessionConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.messages import Command, Event, Finished, Refused, Tokens
from roost.sched.engine import Engine
from roost.step import Executor, StepId, StepPlan, StepResult, Ticket
from tests.sim.model import Model
from tests.sim.wishes import SimStopFinder
from tests.sim.witness import Witness

VOCAB = 50
MODEL = Model(vocab=VOCAB, window_1=None, window_2=None, draft_skill=0)


def resolved(
    num_pages: int = 40, spec: str = "none", session: SessionConfig | None = None, **sched: int | bool
) -> Resolved:
    """A small configuration: page 4, context 64."""
    memory = MemoryConfig(page_size=4, pool_tokens=(num_pages + 1) * 4, strict_memory=2)
    base = SchedConfig(context=64, max_running=3, max_queued=4, chunk=16)
    config = EngineConfig(
        memory=memory,
        sched=replace(base, **sched),  # type: ignore[arg-type]
        session=session or SessionConfig(),
        spec=SpecConfig(spec=spec),
    )
    return resolve(config, ModelTraits(vocab_size=VOCAB))


def witness(options: Resolved) -> Witness:
    """A device that runs as late as it can and never breaks."""
    return Witness(options, MODEL, (0, 0), lambda what: False)


class Recorder:
    """The witness, with every plan kept; steps that `broken` names break when they are collected."""

    def __init__(self, options: Resolved, broken: frozenset[int] = frozenset()) -> None:
        self._witness = witness(options)
        self._witness.doomed.update(StepId(step) for step in broken)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Ticket:
        """Keep the plan and launch it."""
        self.plans.append(plan)
        return self._witness.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """Collect a step."""
        return self._witness.collect(ticket)


@dataclass(slots=True)
class EngineClientDouble:
    """An engine and what came back from it."""

    engine: Engine
    clock: VirtualClock
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

    def tick(self, count: int = 1) -> None:
        """Run the loop a number of times."""
        for _ in range(count):
            self.engine.tick()

    def wait(self, milliseconds: int) -> None:
        """Let time pass, then run one tick."""
        self.clock.advance(milliseconds * 1_000_000)
        self.engine.tick()

    def end(self, name: str) -> Finished | Refused:
        """The one terminal event of a request."""
        ends = [event for event in self.events if isinstance(event, Finished | Refused) and event.request_id == name]
        assert len(ends) == 1, (name, ends)
        return ends[0]

    def finished(self, name: str) -> Finished:
        """The same, for a request that was accepted."""
        end = self.end(name)
        assert isinstance(end, Finished), end
        return end

    def output(self, name: str) -> list[int]:
        """The tokens a request was sent."""
        sent = [event for event in self.events if isinstance(event, Tokens) and event.request_id == name]
        return [token for event in sent for token in event.tokens]

    def run(self) -> None:
        """Tick until everything has ended."""
        for _ in range(1000):
            if not self.engine.has_work:
                return
            self.engine.tick()
        raise AssertionError("the engine does not come to rest")


def engine_client(executor: Executor | None = None, **options: int | bool | str | SessionConfig) -> EngineClientDouble:
    """A engine_client with some options changed."""
    small, clock = resolved(**options), VirtualClock()  # type: ignore[arg-type]
    return EngineClientDouble(Engine(small, executor or witness(small), clock, new_stop_finder=SimStopFinder), clock)
