"""Host time of a step on a CPU: all of a step but the model, with one request: `python -m bench.host_steps`.

A real engine and executor run a stand-in for the model whose passes only read memory, as weights are read, and leave
the caches cold. Their time, and that of the attention plan, is taken out of the step's. Prints microseconds of a step
by phase and how many torch operations each has; --trees PATH PATH … runs several checkouts by turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.layers.attention import Attend
from roost.layers.ops import TORCH_OPS
from roost.messages import Event, Submit
from roost.models.model import KvShape, traits_of
from roost.runner.executor import TorchExecutor
from roost.sampling.params import SamplingParams
from roost.sched import engine as engine_module
from roost.sched.engine import Engine

VOCAB, HIDDEN, PROMPT_LEN = 49152, 576, 64  # of SmolLM2-135M
SPECS = {
    "plain": SpecConfig(),
    "chain": SpecConfig(spec="eagle", draft="head", spec_steps=4, spec_lookup="off"),
    "ngram": SpecConfig(spec="ngram", spec_steps=4),
}
SAMPLINGS = {"greedy": SamplingParams(temperature=0), "sampled": SamplingParams(temperature=0.7, top_p=0.9, seed=1)}
CASES = (("plain", "greedy"), ("chain", "greedy"), ("ngram", "greedy"), ("plain", "sampled"), ("chain", "sampled"))
BLOCK = 10  # steps that are timed together: threads do not end a step at the same moment
# what a mode sees of numpy() and from_numpy(), which cost next to nothing
FREE = ("detach", "alias", "lift_fresh", "to", "resolve_conj", "resolve_neg")
MODEL, WAITING = "model", "waiting"  # not the host's work
OUTSIDE = "time outside the model"
# phase -> methods of the device side that belong to it, by the object they are methods of
PHASES = {
    "lengths and checks": (("lengths", "of_step"), ("runner", "_check")),
    "page tables": (("runner", "apply"),),
    "layout": (("runner", "_graph"), ("runner", "_sent"), ("runner", "_sent_rows")),
    "inputs": (("passes", "forward"), ("passes", "logits")),
    "draft": (("passes", "draft"), ("drafter", "propose")),
    "sample": (("runner", "_sample"),),
    "accept": (("passes", "accept_and_extend"),),
    "extend": (("drafter", "extend"),),
    "result": (("runner", "_finish"),),
    "rest of the step": (("runner", "run"),),
}
STAGES = {
    "settle": ("settle",),
    "plan": ("plan",),
    "admit and marks": ("expire", "act_on_marks", "end_overdue", "admit"),
}


class Watch:
    """Time of nested phases, each without those inside it, and torch operations in them."""

    def __init__(self) -> None:
        self._open = threading.local()
        self.times: Counter[str] = Counter()  # nanoseconds of the processor
        self.walls: Counter[str] = Counter()  # nanoseconds that have passed, nested phases included
        self.counts: Counter[str] = Counter()  # torch operations

    def enter(self, name: str) -> list[Any]:
        """Begin a phase, the innermost: its name, what phases inside it took, and when it began."""
        stack: list[list[Any]] = self._open.__dict__.setdefault("stack", [])
        frame = [name, 0, time.perf_counter_ns(), time.thread_time_ns()]
        stack.append(frame)
        return frame

    def leave(self, frame: list[Any]) -> None:
        """End a phase that was begun last."""
        taken = time.thread_time_ns() - frame[3]
        name, stack = frame[0], self._open.stack
        self.walls[name] += time.perf_counter_ns() - frame[2]
        stack.pop()
        self.times[name] += taken - frame[1]
        if stack:
            stack[-1][1] += taken

    @property
    def current(self) -> str:
        """The innermost phase of this thread."""
        stack = self._open.__dict__.get("stack")
        return str(stack[-1][0]) if stack else ""

    def wrap(self, owner: object, name: str, phase: str) -> None:
        """Time a function or method of an object; nothing where there is none."""
        work: Callable[..., object] | None = getattr(owner, name, None)
        if work is None:
            return

        def timed(*args: object, **kwargs: object) -> object:
            frame = self.enter(phase)
            try:
                return work(*args, **kwargs)
            finally:
                self.leave(frame)

        setattr(owner, name, timed)


class Counting(TorchDispatchMode):
    """Counts torch operations by the phase they are in."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.overloadpacket.__name__ not in FREE:
            self._watch.counts[self._watch.current] += 1
        return func(*args, **(kwargs or {}))


class StandIn:
    """A model, or a head, that says one token after every other; a pass reads some memory."""

    ops = TORCH_OPS
    dtype = torch.float32
    hidden_size = activation_width = HIDDEN
    aux_layers = (0,)
    num_tokens = VOCAB
    num_layers = 1
    kv = (KvShape(num_kv_heads=3, head_dim=64, scale=1.0, dtype=torch.float32),)

    def __init__(self, watch: Watch, megabytes: int) -> None:
        self._watch, self._weights = watch, np.ones(megabytes * 2**17)
        self._hidden = torch.zeros(1024, HIDDEN)
        ranks = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0)) + 1
        self._logits = (-2.0 * ranks.log()).expand(1024, -1).clone()

    @property
    def traits(self):  # type: ignore[no-untyped-def]
        """One full layer."""
        return traits_of(self.kv, vocab_size=VOCAB, context_max=8192)

    def embed(self, tokens: Tensor) -> Tensor:
        """Nothing in particular."""
        return self._hidden[: len(tokens)]

    def forward(self, tokens: Tensor, *args: object) -> Tensor:
        """Read the weights."""
        frame = self._watch.enter(MODEL)
        self._weights.sum()
        hidden = self._hidden[: len(tokens)]
        self._watch.leave(frame)
        return hidden

    def forward_with_aux(
        self, tokens: Tensor, positions: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same."""
        hidden = self.forward(tokens)
        return hidden, (hidden,) * len(aux_layers)

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """As the target has it."""
        return last

    def logits(self, hidden: Tensor) -> Tensor:
        """Always the same, like those of text: a token of rank r has r ** -2."""
        frame = self._watch.enter(MODEL)
        logits = self._logits[: len(hidden)]
        self._watch.leave(frame)
        return logits

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The same ids."""
        return draft_ids


def _ignore(event: Event) -> None:
    pass


def _engine(watch: Watch, spec: SpecConfig, megabytes: int) -> tuple[Engine, TorchExecutor]:
    """An engine over stand-ins, whose passes alone are timed."""
    model = StandIn(watch, megabytes)
    memory, sched = MemoryConfig(page_size=16), SchedConfig(context=8192, max_running=64)
    resolved = resolve(EngineConfig(memory=memory, sched=sched, spec=spec), model.traits)
    head = StandIn(watch, max(1, megabytes // 16)) if spec.draft else None
    executor = TorchExecutor(model, resolved, torch.device("cpu"), head)
    watch.wrap(executor.runner.passes.attention, "read", MODEL)
    return Engine(resolved, executor, SystemClock()), executor


def _time_phases(watch: Watch, engine: Engine, executor: TorchExecutor) -> None:
    """Time all phases from now on, which itself takes a tenth of a step."""
    runner = executor.runner
    owners = {"runner": runner, "passes": runner.passes, "lengths": runner.passes.lengths}
    owners["drafter"] = runner.passes.drafter
    for phase, methods in PHASES.items():
        for owner, name in methods:
            watch.wrap(owners[owner], name, phase)
    watch.wrap(executor, "launch", "launch")
    watch.wrap(executor, "collect", WAITING)
    for phase, functions in STAGES.items():
        for name in functions:
            watch.wrap(engine_module, name, phase)
    watch.wrap(engine, "_wait_to_plan", WAITING)
    watch.wrap(engine, "tick", "rest of the loop")


def measure(spec: str, sampling: str, steps: int, megabytes: int) -> dict[str, float]:
    """Median microseconds of a step by phase, with its torch operations, and of all that is not the model."""
    watch = Watch()
    engine, executor = _engine(watch, SPECS[spec], megabytes)
    tokens = tuple(range(1, PROMPT_LEN + 1))
    limits = {"max_new_tokens": 8000, "sampling": SAMPLINGS[sampling], "stop_token_ids": frozenset({2})}
    engine.post(Submit(request_id="0", tokens=tokens, **limits), _ignore)  # type: ignore[arg-type]
    for _ in range(20):
        engine.tick()
    num_blocks = max(1, steps // BLOCK)
    outside = statistics.median(_block(watch, engine)[OUTSIDE] for _ in range(num_blocks))
    _time_phases(watch, engine, executor)
    operations = _count_operations(watch, engine, executor)
    blocks = [_block(watch, engine) for _ in range(num_blocks)]
    assert engine.state.running, "the request ended while it was measured"
    executor.close()
    medians = {name: statistics.median(block.get(name, 0.0) for block in blocks) for name in blocks[0]}
    loop = sum(medians.get(name, 0.0) for name in (*STAGES, "launch", "rest of the loop"))
    step = sum(medians.get(name, 0.0) for name in PHASES)
    return {**medians, **operations, "step": step, "loop": loop, OUTSIDE: outside}


def _block(watch: Watch, engine: Engine) -> dict[str, float]:
    """Run some steps; microseconds of a step by phase, and of all that is not the model."""
    watch.times.clear()
    watch.walls.clear()
    started = time.perf_counter_ns()
    for _ in range(BLOCK):
        engine.tick()
    outside = time.perf_counter_ns() - started - watch.walls[MODEL]
    return {name: taken / BLOCK / 1e3 for name, taken in [*watch.times.items(), (OUTSIDE, outside)]}


def _count_operations(watch: Watch, engine: Engine, executor: TorchExecutor) -> dict[str, float]:
    """Torch operations of a step by phase."""
    runner = executor.runner
    run, apply = runner.run, runner.apply

    def counted(work: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            with Counting(watch):
                return work(*args)

        return call

    runner.run, runner.apply = counted(run), counted(apply)  # type: ignore[method-assign,assignment]
    engine.tick()
    watch.counts.clear()
    for _ in range(BLOCK):
        engine.tick()
    counts, watch.counts = watch.counts, Counter()
    runner.run, runner.apply = run, apply  # type: ignore[method-assign]
    engine.tick()
    return {f"{name}, operations": count / BLOCK for name, count in counts.items()}


def _in_tree(tree: Path, case: tuple[str, str], args: argparse.Namespace) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(tree / "src")}
    command = [
        sys.executable,
        __file__,
        "--case",
        *case,
        "--steps",
        str(args.steps),
        "--megabytes",
        str(args.megabytes),
    ]
    found = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=tree)
    numbers: dict[str, float] = json.loads(found.stdout)
    return numbers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.host_steps", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of a measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, of all trees by turns")
    parser.add_argument("--megabytes", type=int, default=64, help="memory that a pass of the model reads")
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path.cwd()], help="checkouts to compare")
    parser.add_argument("--case", nargs=2, help="measure one case here, and print its numbers as JSON")
    args = parser.parse_args()
    if args.case:
        torch.set_num_threads(1)
        print(json.dumps(measure(*args.case, args.steps, args.megabytes)))
        return
    for case in CASES:
        rounds = [[_in_tree(tree.resolve(), case, args) for tree in args.trees] for _ in range(args.rounds)]
        print(f"\n{', '.join(case)}: us a step (torch operations)")
        _print_case(rounds, len(args.trees))


def _print_case(rounds: list[list[dict[str, float]]], num_trees: int) -> None:
    """One line for each phase, one column for each tree."""
    for name in (*PHASES, "step", *STAGES, "launch", "rest of the loop", "loop", OUTSIDE):
        cells = []
        for tree in range(num_trees):
            found = [numbers[tree][name] for numbers in rounds if name in numbers[tree]]
            parts = PHASES if name == "step" else (name,)
            operations = sum(rounds[0][tree].get(f"{part}, operations", 0) for part in parts)
            cells.append(f"{statistics.median(found):8.0f} ({operations:5.1f})" if found else f"{'':16}")
        if any(cell.strip() for cell in cells):
            print(f"  {name:22} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
