"""What a turn costs on the host does not grow with its session's history (failure mode 25).

Counted, not timed: operations of the interpreter inside the engine, and tokens copied out of the record.
"""

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import roost
from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.kv.node import Key
from roost.messages import OpenSession, Submit
from roost.sched.engine import Engine
from roost.session.journal import SessionJournal
from roost.session.record import Record
from roost.step import StepId, StepPlan, StepResult, Ticket
from tests.support.memory_logs import MemoryLogs

PRODUCT = str(roost.__file__).removesuffix("__init__.py")
PLAIN = SpecConfig()
JOINT = SpecConfig(spec="eagle", draft="head", spec_steps=3)  # nobody reads the head here
CHAIN = replace(JOINT, spec_lookup="off")


class Instant:
    """An executor that accepts everything at once."""

    def __init__(self, accept_max: int) -> None:
        self._accept_max = accept_max
        self._results: dict[StepId, StepResult] = {}

    def launch(self, plan: StepPlan) -> Ticket:
        """Make the result up."""
        count, width = len(plan.rows), self._accept_max
        self._results[plan.step] = StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=np.where(plan.is_prefill, plan.is_final, width).astype(np.int32),
            tokens=np.full((count, width), 7, dtype=np.int32),
            lengths=np.zeros(count, dtype=np.int32),
        )
        return Ticket(step=plan.step)

    def collect(self, ticket: Ticket) -> StepResult:
        """Hand it over."""
        return self._results.pop(ticket.step)


class Counted(Record):
    """A record that counts the tokens copied out of it."""

    num_copied = 0

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """A copy of some tokens."""
        Counted.num_copied += stop - start
        return super().slice(start, stop)

    def key(self, length: int, pair: bool) -> Key:
        """The tree's key of some tokens."""
        Counted.num_copied += length
        return super().key(length, pair)


def _counted(action: Any) -> tuple[int, int]:
    """Operations of the engine's own code while something is done, and tokens copied."""
    num_operations = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num_operations
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        num_operations += event == "opcode"
        return trace

    Counted.num_copied = 0
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return num_operations, Counted.num_copied


def _turn_after(
    history_len: int, page_size: int, spec: SpecConfig, window: int | None, journal: SessionJournal | None = None
) -> tuple[int, int]:
    """The cost of a turn of 16 tokens in and 8 out, from its submission until the engine is idle."""
    memory = MemoryConfig(page_size=page_size, pool_tokens=40_000)
    sched = SchedConfig(context=12_000, max_running=2, chunk=16_384)
    traits = ModelTraits(vocab_size=100, window=window)
    resolved = resolve(EngineConfig(memory=memory, sched=sched, spec=spec), traits)
    engine = Engine(resolved, Instant(resolved.spec.accept_max), VirtualClock(), journal=journal)
    engine.post(OpenSession(session_id="s"), lambda event: None)
    engine.tick()
    engine.state.sessions.table["s"].record = Counted()

    def turn(name: str, num_in: int) -> None:
        submit = Submit(request_id=name, tokens=(5,) * num_in, max_new_tokens=8, session_id="s")
        engine.post(submit, lambda event: None)
        while engine.has_work:
            engine.tick()

    turn("first", 16)
    turn("history", history_len)
    return _counted(lambda: turn("measured", 16))


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("spec", [PLAIN, CHAIN], ids=["plain", "chain"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_turn_costs_the_same_after_ten_thousand_tokens(page_size: int, spec: SpecConfig, window: int | None) -> None:
    short, long = (_turn_after(length, page_size, spec, window) for length in (160, 10_000))
    assert long[1] == short[1] <= 32  # its own tokens, and those a chunk looks ahead to
    assert abs(long[0] - short[0]) <= 0.02 * short[0]


def test_a_turn_adds_its_own_tokens_to_the_journal_and_no_others() -> None:
    journals = SessionJournal(MemoryLogs()), SessionJournal(MemoryLogs())
    short, long = (
        _turn_after(length, 16, PLAIN, None, journal) for length, journal in zip((160, 10_000), journals, strict=True)
    )
    assert long[1] == short[1] <= 32 + 16 + 8
    assert abs(long[0] - short[0]) <= 0.02 * short[0]


def test_a_turn_whose_drafts_are_looked_up_tells_the_device_its_history_once() -> None:
    short, long = (_turn_after(length, 16, JOINT, None) for length in (160, 10_000))
    assert long[1] - short[1] == 10_000 - 160
    assert abs(long[0] - short[0]) <= 0.02 * short[0]
