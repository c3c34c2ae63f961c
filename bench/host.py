"""Host time of the control plane, without a device: `make bench`.

An executor that answers at once stands in for the device, and its own time is taken out. Prints a table and, with
--json PATH, writes the same numbers. Absolute times are this machine's; compare them within one run.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.kv.lease import Claim, TurnId
from roost.kv.store import Store
from roost.messages import Event, Submit
from roost.sched.engine import Engine
from roost.step import LookupColumns, StepId, StepPlan, StepResult, Ticket

VOCAB = 50_000
PROMPT_LEN = 64
EOS = 2  # a stop id that the outputs, all of token 7, never meet
PLAIN = SpecConfig()
CHAIN = SpecConfig(spec="eagle", draft="head", spec_steps=3, spec_lookup="off")  # nobody reads the head here
JOINT = SpecConfig(spec="eagle", draft="head")  # its length is chosen, and drafts are looked up beside it
CASES = {"plain": PLAIN, "chain S=3": CHAIN, "auto, looked up": JOINT}
MATCHES = (0, 1, 1, 2, 3)  # what lookups find again, row by row and step by step


@dataclass(slots=True)
class Instant:
    """An executor that accepts everything at once; `spent` is the time it took itself."""

    accept_max: int
    lookup_steps: int = 0  # drafts that are looked up for a round
    spent: float = 0.0
    lengths: dict[int, int] = field(default_factory=dict)
    results: dict[StepId, StepResult] = field(default_factory=dict)

    def launch(self, plan: StepPlan) -> Ticket:
        """Make the result up."""
        started = time.perf_counter()
        count = len(plan.rows)
        accept = np.where(plan.is_prefill, plan.is_final, np.minimum(self.accept_max, plan.query_lens)).astype(np.int32)
        for row, is_prefill, end, a in zip(
            plan.rows, plan.is_prefill, plan.start_positions + plan.query_lens, accept, strict=True
        ):
            self.lengths[int(row)] = int(end) if is_prefill else self.lengths[int(row)] + int(a)
        self.results[plan.step] = StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=accept,
            tokens=np.full((count, self.accept_max), 7, dtype=np.int32),
            lengths=np.array([self.lengths[int(row)] for row in plan.rows], dtype=np.int32),
            lookups=self._looked_up(plan) if self.lookup_steps and not plan.is_prefill.any() else None,
        )
        self.spent += time.perf_counter() - started
        return Ticket(step=plan.step)

    def _looked_up(self, plan: StepPlan) -> LookupColumns:
        """Short matches of what is not said next, and never drafted."""
        count = len(plan.rows)
        match_lens = np.array([MATCHES[(int(plan.step) + row) % len(MATCHES)] for row in range(count)], dtype=np.int32)
        return LookupColumns(
            match_lens=match_lens,
            is_used=np.zeros(count, dtype=np.bool_),
            drafts=np.full((count, self.lookup_steps), 8, dtype=np.int32),
            num_nodes=plan.query_lens,
        )

    def collect(self, ticket: Ticket) -> StepResult:
        """Hand it over."""
        return self.results.pop(ticket.step)


def _resolved(rows: int, strict: int, spec: SpecConfig) -> Resolved:
    memory = MemoryConfig(page_size=16, pool_tokens=rows * 3072 + 4096, strict_memory=strict)
    sched = SchedConfig(context=2560, max_running=rows, max_queued=rows, chunk=8192, overlap=True)
    return resolve(EngineConfig(memory=memory, sched=sched, spec=spec), ModelTraits(vocab_size=VOCAB))


def _ignore(event: Event) -> None:
    pass


def tick_us(rows: int, strict: int, spec: SpecConfig, ticks: int) -> float:
    """Median host time of a steady decode tick, in microseconds."""
    resolved = _resolved(rows, strict, spec)
    executor = Instant(3 if spec is JOINT else resolved.spec.accept_max, resolved.spec.lookup_steps)
    engine = Engine(resolved, executor, SystemClock())
    rng = np.random.default_rng(0)
    for i in range(rows):
        tokens = tuple(int(token) for token in rng.integers(0, VOCAB, PROMPT_LEN))
        submit = Submit(request_id=str(i), tokens=tokens, max_new_tokens=2400, stop_token_ids=frozenset({EOS}))
        engine.post(submit, _ignore)
    while len(engine.state.running) < rows or any(request.in_prefill for request in engine.state.running):
        engine.tick()
    engine.tick()
    times = []
    for _ in range(ticks):
        before, started = executor.spent, time.perf_counter()
        engine.tick()
        times.append(time.perf_counter() - started - (executor.spent - before))
    assert len(engine.state.running) == rows, "a request ended while it was measured"
    return statistics.median(times) * 1e6


def match_us(length: int, page_size: int) -> float:
    """Median time to match a cached prompt in the prefix tree, in microseconds."""
    resolved = _resolved(32, 0, PLAIN)
    store = Store(page_size, resolved.books)
    key = np.random.default_rng(0).integers(0, VOCAB, length).astype(np.int64)
    lease = store.open(TurnId(1), "", key)
    store.reserve(lease, 0, [length])
    store.claim(lease, Claim(step=StepId(0), size=length, most=length))
    store.ledger.reclaim(StepId(0))
    store.settle(lease, StepId(0), length)
    for cut in range(length // 8, length + 1, length // 8):  # as eight requests would: eight nodes on the path
        store.publish(lease, key[:cut], 0)
    times = []
    for _ in range(200):
        started = time.perf_counter()
        match = store.tree.match("", key)
        times.append(time.perf_counter() - started)
    assert match is not None and match.length == length
    return statistics.median(times) * 1e6


def sim_ticks_per_s(seeds: int) -> float:
    """Simulated ticks a second on one core, witness, audits and checker included."""
    from tests.sim.world import run_seed  # noqa: PLC0415 (only where the tests are)

    started = time.perf_counter()
    ticks = sum(run_seed(seed).ticks for seed in range(seeds))
    return ticks / (time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.host", description=__doc__)
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--ticks", type=int, default=200, help="ticks per measurement")
    args = parser.parse_args()
    numbers: dict[str, float] = {}
    print(f"{'host time per tick':24} {'audit off':>22} {'sums every tick':>22} {'every page':>22}   (us, us per row)")
    for name, spec in CASES.items():
        for rows in (1, 8, 64, 512):
            cells = []
            for strict in (0, 1, 2):
                us = tick_us(rows, strict, spec, args.ticks if strict < 2 else max(5, args.ticks // 10))
                numbers[f"tick_us/{name}/rows {rows}/strict {strict}"] = us
                cells.append(f"{us:12.0f} {us / rows:9.1f}")
            print(f"{name + ', rows ' + str(rows):24} {' '.join(cells)}")
    numbers["match_us/32k/page 16"] = match_us(32768, 16)
    print(f"radix match of 32768 tokens at page 16: {numbers['match_us/32k/page 16']:.0f} us")
    numbers["sim_ticks_per_s"] = sim_ticks_per_s(20)
    print(f"simulated ticks a second, one core: {numbers['sim_ticks_per_s']:.0f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(numbers, file, indent=1)


if __name__ == "__main__":
    main()
