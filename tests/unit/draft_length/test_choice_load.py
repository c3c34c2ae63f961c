"""The policy under load: the engine over a device with known costs, while prompts keep coming, against plain decoding.

As many clients as keep the queue filled, each asking again as soon as it is answered; time is the device's alone.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest

from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.messages import Begun, Event, Finished, Submit, Tokens
from roost.sched.engine import Engine
from roost.step import StepId, StepPlan, StepResult, Ticket
from tests.support.spec_configs import AUTO_CHAIN, spec_config

NUM_ROWS = 32
Cost = Callable[[int, int], int]  # (rounds, width) -> time of a step
DEAR: Cost = lambda rounds, width: 400 + 600 * rounds * width  # noqa: E731 (bound by computing)
GPU: Cost = lambda rounds, width: 4000 + 60 * (width - 1) + 10 * rounds * width  # noqa: E731


class Device:
    """Runs one step after the other; drafts are right by chance."""

    def __init__(self, clock: VirtualClock, cost: Cost, token_cost: int, accepted: float) -> None:
        self._clock, self._cost, self._token_cost, self._accepted = clock, cost, token_cost, accepted
        self._rng = random.Random(0)
        self._lengths: dict[int, int] = {}  # by row
        self._free_at = 0
        self._out: dict[StepId, tuple[int, StepResult]] = {}

    def launch(self, plan: StepPlan) -> Ticket:
        """Begins as soon as the step before is done."""
        rounds = plan.query_lens[~plan.is_prefill].tolist()
        time = self._cost(len(rounds), max(rounds)) if rounds else 400
        time += self._token_cost * int(plan.query_lens[plan.is_prefill].sum())
        self._free_at = max(self._free_at, self._clock.now_ns()) + time
        accept_lens = [self._take(plan, i) for i in range(len(plan.rows))]
        result = StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=np.array(accept_lens, dtype=np.int32),
            tokens=np.full((len(plan.rows), plan.shape.accept_max), 5, dtype=np.int32),
            lengths=np.array([self._lengths[row] for row in plan.rows.tolist()], dtype=np.int32),
            logprobs=None,
            prompt_logprobs=None,
        )
        self._out[plan.step] = self._free_at, result
        return Ticket(step=plan.step)

    def _take(self, plan: StepPlan, i: int) -> int:
        """Tokens that a row of a plan adds."""
        row, width = int(plan.rows[i]), int(plan.query_lens[i])
        if plan.is_prefill[i]:
            self._lengths[row] = int(plan.start_positions[i]) + width
            return int(plan.is_final[i])
        length = 1
        while length < width and self._rng.random() < self._accepted:
            length += 1
        self._lengths[row] += length
        return length

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits until the step is done."""
        done_at, result = self._out.pop(ticket.step)
        self._clock.advance(max(0, done_at - self._clock.now_ns()))
        return result

    def close(self) -> None:
        """Nothing to close."""


def _rate(spec: SpecConfig, mixed: bool, overlap: bool, cost: Cost, token_cost: int, accepted: float) -> float:
    """Tokens in a time, over some hundred requests of many lengths."""
    config = EngineConfig(
        memory=MemoryConfig(page_size=16, pool_tokens=NUM_ROWS * 1024),
        sched=SchedConfig(context=1024, max_running=NUM_ROWS, chunk=512, mixed=mixed, overlap=overlap),
        spec=spec,
    )
    clock, rng = VirtualClock(), random.Random(3)
    resolved = resolve(config, ModelTraits(vocab_size=100))
    engine = Engine(resolved, Device(clock, cost, token_cost, accepted), clock)
    num_tokens = num_ended = num_sent = 0

    def hear(event: Event) -> None:
        nonlocal num_tokens, num_ended
        assert isinstance(event, Begun | Tokens | Finished), event
        if isinstance(event, Tokens):
            num_tokens += len(event.tokens)
        elif isinstance(event, Finished):
            num_ended += 1

    while num_ended < 300:
        while num_sent - num_ended < 2 * NUM_ROWS:
            prompt = tuple(rng.randrange(6, 99) for _ in range(rng.randint(100, 300)))
            name, num_sent = str(num_sent), num_sent + 1
            engine.post(Submit(request_id=name, tokens=prompt, max_new_tokens=rng.randint(16, 48)), hear)
        engine.tick()
    return num_tokens / clock.now_ns()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("cost", "token_cost", "accepted", "least"), [(DEAR, 150, 0.5, 0.95), (DEAR, 150, 0.7, 0.95), (GPU, 5, 0.7, 1.3)]
)
def test_chosen_lengths_keep_up_with_plain_decoding_while_prompts_keep_coming(
    cost: Cost, token_cost: int, accepted: float, least: float, mixed: bool, overlap: bool
) -> None:
    plain, auto = (
        _rate(spec, mixed, overlap, cost, token_cost, accepted)
        for spec in (SpecConfig(), spec_config(AUTO_CHAIN, auto=True))
    )
    assert auto > least * plain, auto / plain
