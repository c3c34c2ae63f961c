"""The serving mix in virtual time: the real scheduler over a device that is a formula, `python -m bench.virtual_mix`.

Clients in a closed loop, each asking again as soon as it is answered. Shows what a rule of the scheduler does to
throughput, time to first token and time between tokens on a GPU or CPU of known step times, in seconds and without one.
"""

import argparse
import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np

from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.messages import Event, Finished, Submit, Tokens
from roost.sched.engine import Engine
from roost.step import StepId, StepPlan, StepResult, Ticket

T = TypeVar("T")
MS = 1_000_000  # nanoseconds
ASK_NS = MS // 2  # from an answer to the same client's next request
VOCAB = 50_000

StepTime = Callable[[int, int, int, int], float]  # (rounds, width, prompt tokens, chunks) -> milliseconds


def h200(num_rounds: int, width: int, num_tokens: int, num_chunks: int) -> float:
    """An H200 with a model of 8B, bf16, mixed steps in one pass."""
    drafts = 0.45 * (width - 1) if num_rounds else 0.0
    if not num_tokens:
        return 4.9 + 0.031 * num_rounds + (width - 1) * (0.47 + 0.0109 * num_rounds)
    return max(3.4, 0.022 * (num_tokens + num_rounds * width)) + 0.025 * (num_rounds + num_chunks) + 1 + drafts


def cpu(num_rounds: int, width: int, num_tokens: int, num_chunks: int) -> float:
    """A CPU with a small model."""
    return (18.6 + 1.4 * num_rounds * width if num_rounds else 15) + 1.0 * num_tokens


DEVICES: dict[str, StepTime] = {"h200": h200, "cpu": cpu}


class ArrivalClock(VirtualClock):
    """Virtual time in which requests arrive when they are due, also while the loop waits."""

    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._num_scheduled = 0

    def at(self, time: int, arrive: Callable[[], None]) -> None:
        """Schedule an arrival."""
        self._num_scheduled += 1
        heapq.heappush(self._due, (time, self._num_scheduled, arrive))

    def advance(self, delta_ns: int) -> None:
        """Move time forward, and let arrive who is due."""
        end = self.now_ns() + delta_ns
        while self._due and self._due[0][0] <= end:
            time, _, arrive = heapq.heappop(self._due)
            super().advance(max(0, time - self.now_ns()))
            arrive()
        super().advance(max(0, end - self.now_ns()))

    def receive(self, mailbox: "SimpleQueue[T]", until_ns: int) -> T:
        """The next of a mailbox; raises Empty if there is none by then."""
        while mailbox.empty() and self._due and self._due[0][0] < until_ns:
            self.advance(max(0, self._due[0][0] - self.now_ns()))
        if mailbox.empty():
            self.advance(max(0, until_ns - self.now_ns()))
            raise Empty
        return mailbox.get()


class Device:
    """Runs one step after the other; each takes what the formula says."""

    def __init__(self, clock: ArrivalClock, step_ms: StepTime, accept_len: float, host_ms: float, noise: float) -> None:
        self._clock, self._step_ms, self._noise = clock, step_ms, noise
        self._host_ns, self._accept_len = int(host_ms * MS), accept_len
        self._rng = random.Random(0)
        self._lengths: dict[int, int] = {}  # by row
        self._free_at = 0
        self._out: dict[StepId, tuple[int, StepResult]] = {}
        self.idle_ns = 0
        self.kinds: dict[str, list[float]] = {"rounds": [], "chunks": [], "mixed": []}
        self.num_prompt_tokens: list[int] = []

    def launch(self, plan: StepPlan) -> Ticket:
        """Begins as soon as the step before is done."""
        self._clock.advance(self._host_ns)
        num_chunks = int(plan.is_prefill.sum())
        num_rounds, num_tokens = len(plan.rows) - num_chunks, len(plan.tokens)
        width = int(plan.query_lens[~plan.is_prefill].max()) if num_rounds else 0
        time = self._step_ms(num_rounds, width, num_tokens, num_chunks) * (1 + self._noise * abs(self._rng.gauss(0, 1)))
        self.kinds["rounds" if not num_chunks else "mixed" if num_rounds else "chunks"].append(time)
        if num_chunks:
            self.num_prompt_tokens.append(num_tokens)
        self.idle_ns += max(0, self._clock.now_ns() - self._free_at)
        self._free_at = max(self._free_at, self._clock.now_ns()) + int(time * MS)
        result = StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=np.array([self._take(plan, i) for i in range(len(plan.rows))], dtype=np.int32),
            tokens=np.full((len(plan.rows), plan.shape.accept_max), 5, dtype=np.int32),
            lengths=np.array([self._lengths[row] for row in plan.rows.tolist()], dtype=np.int32),
        )
        self._out[plan.step] = self._free_at, result
        return Ticket(step=plan.step)

    def _take(self, plan: StepPlan, i: int) -> int:
        """Tokens that a row of a plan adds."""
        row, width = int(plan.rows[i]), int(plan.query_lens[i])
        if plan.is_prefill[i]:
            self._lengths[row] = int(plan.start_positions[i]) + width
            return int(plan.is_final[i])
        length = min(width, int(self._accept_len) + (self._rng.random() < self._accept_len % 1))
        self._lengths[row] += length
        return length

    def collect(self, ticket: Ticket) -> StepResult:
        """Waits until the step is done."""
        done_at, result = self._out.pop(ticket.step)
        self._clock.advance(max(0, done_at - self._clock.now_ns()))
        return result


@dataclass(slots=True)
class Served:
    """What clients saw."""

    first_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_ended: int = 0


def serve(
    config: EngineConfig, device: Device, clock: ArrivalClock, at_once: int, num_requests: int
) -> tuple[Served, float]:
    """Run the mix; what was seen after the first burst, and in which time (seconds)."""
    rng, served = random.Random(3), Served()
    engine = Engine(resolve(config, ModelTraits(vocab_size=VOCAB)), device, clock)
    num_sent, began = 0, 0

    def ask() -> None:
        nonlocal num_sent, began
        if num_sent >= num_requests + at_once:
            return
        number, num_sent, sent_at, last = num_sent, num_sent + 1, clock.now_ns(), [0]
        if number == at_once:
            began = sent_at
        prompt = tuple(rng.randrange(6, VOCAB) for _ in range(rng.randint(40, 1500)))

        def hear(event: Event) -> None:
            now = clock.now_ns()
            if isinstance(event, Tokens) and number >= at_once:
                (served.gaps_ms if last[0] else served.first_ms).append((now - (last[0] or sent_at)) / MS)
            if isinstance(event, Tokens):
                served.num_tokens += len(event.tokens) if began else 0
                last[0] = now
            elif isinstance(event, Finished):
                served.num_ended += 1
                clock.at(now + ASK_NS, ask)

        engine.post(Submit(request_id=str(number), tokens=prompt, max_new_tokens=rng.randint(64, 256)), hear)

    for _ in range(at_once):
        ask()
    while served.num_ended < num_requests:
        if engine.has_work:
            engine.tick()
        else:
            clock.advance(MS)
    return served, (clock.now_ns() - began) / 1e9


def main() -> None:
    """Run the mixes and print a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.virtual_mix", description=__doc__)
    parser.add_argument("--device", choices=tuple(DEVICES), default="h200")
    parser.add_argument("--at-once", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--chunk", type=int, default=None)
    parser.add_argument("--itl-target-ms", type=float, default=None)
    parser.add_argument("--host-ms", type=float, default=0.6, help="of a plan and its launch")
    parser.add_argument("--noise", type=float, default=0.02, help="of the times of steps")
    parser.add_argument("--modes", nargs="+", default=["plain", "eagle", "auto"])
    args = parser.parse_args()
    specs = {"plain": SpecConfig(), "eagle": SpecConfig(spec="eagle", draft="head", spec_steps=3, spec_lookup="off")}
    specs["auto"] = SpecConfig(spec="eagle", draft="head", spec_steps="auto", spec_lookup="off")
    print(
        "mode at once    tok/s  TTFT mean/p99 ms  ITL p50/p99/max ms  idle"
        "   steps: rounds, chunks, mixed (mean ms), prompt tokens"
    )
    for mode in args.modes:
        for at_once in args.at_once:
            options = {"chunk": 2048} if args.chunk is None else {"chunk": args.chunk}
            if args.itl_target_ms is not None:
                options["itl_target_ms"] = args.itl_target_ms
            sched = SchedConfig(context=2048, max_running=at_once, max_queued=2 * at_once, **options)
            memory = MemoryConfig(page_size=16, pool_tokens=at_once * 2048 + 4096)
            clock = ArrivalClock()
            device = Device(clock, DEVICES[args.device], 2.5 if mode != "plain" else 1, args.host_ms, args.noise)
            config = EngineConfig(memory=memory, sched=sched, spec=specs[mode])
            served, seconds = serve(config, device, clock, at_once, max(200, 6 * at_once))
            _show(mode, at_once, served, seconds, device, clock)


def _show(mode: str, at_once: int, served: Served, seconds: float, device: Device, clock: ArrivalClock) -> None:
    first, gaps = (np.percentile(times, (50, 99)) for times in (served.first_ms, served.gaps_ms))
    kinds = ", ".join(f"{len(times)} ({statistics.mean(times or [0]):.1f})" for times in device.kinds.values())
    print(
        f"{mode:5} {at_once:7} {served.num_tokens / seconds:8.0f}  {statistics.mean(served.first_ms):7.0f}"
        f" {first[1]:6.0f}  {gaps[0]:9.1f} {gaps[1]:6.1f} {max(served.gaps_ms):6.1f}"
        f"  {device.idle_ns / clock.now_ns():6.1%}   {kinds}, {statistics.mean(device.num_prompt_tokens):.0f}"
    )


if __name__ == "__main__":
    main()
