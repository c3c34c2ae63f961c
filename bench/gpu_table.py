"""Decoding on a GPU: `python -m bench.gpu_table --out FOLDER`. Milliseconds per output token, scheduler included.

Random weights in the shapes of Llama-8B, SmolLM2-135M, Qwen3-30B-A3B, Qwen3.5-9B and others, 512-token prompts, 256
tokens decoded greedily: plain and with an EAGLE-3 head whose accept length is held at 2.5 (simulated: the head is
random), at depth 0 and 1, on several page sizes; transformers beside them. Then where the time goes: how busy
the GPU is, host time, the largest kernels. Shapes named `…-of-8` are what one of eight ranks has of a model.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import roost.forward.passes as passes_module
from bench.gpu_shapes import DEVICE, SHAPES, WEIGHT_BYTES, RandomState, floor
from bench.gpu_transformers import transformers_ms
from bench.heads import untrained_head
from bench.scale_shapes import PARTS
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.drafters.accept import Accepted
from roost.drafters.tree import Trees
from roost.forward.layout import StepLayout
from roost.forward.passes import Passes, TargetOutput
from roost.grammar.matcher import NewMatcher
from roost.layers.rounds import NOTHING, ChainInputs
from roost.messages import Event, Finished, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of

CHAIN = SpecConfig(spec="eagle3", draft="-", spec_steps=3, spec_lookup="off")
NUM_PARTS = 5  # of a run, to take the median of


@contextmanager
def accepting(is_on: bool) -> Iterator[None]:
    """Rounds that add two tokens or three, as the target's first token has it: 2.5 of them on average."""

    def forced(trees: Trees, targets: Tensor, accept_max: int) -> Accepted:
        number = torch.arange(accept_max, device=targets.device)
        num_nodes = (trees.tokens != NOTHING).sum(dim=1).clamp(min=1)  # a chunk's root is alone
        lens = torch.minimum((2 + targets[:, 0] % 2).clamp(max=accept_max), num_nodes)
        is_kept = number < lens[:, None]
        nodes = torch.minimum(number, lens[:, None] - 1)
        return Accepted(lens=lens, tokens=targets[:, :accept_max].masked_fill(~is_kept, NOTHING), nodes=nodes)

    def forced_chains(
        passes: Passes, layout: StepLayout, target: TargetOutput, inputs: ChainInputs, drawn: Tensor
    ) -> tuple[Accepted, Tensor]:
        lens = 2 + drawn[:, :1] % 2
        number = torch.arange(1, drawn.shape[1], device=drawn.device)
        drafts = torch.where(number < lens, drawn[:, :-1], NOTHING)
        tokens = torch.cat([inputs.tokens[:, :1], drafts], dim=1)
        return real_chains(passes, layout, target, replace(inputs, tokens=tokens), drawn)

    real, real_chains = passes_module.accept, Passes._accept_and_extend_chains
    if is_on:
        passes_module.accept = forced
        Passes._accept_and_extend_chains = forced_chains  # type: ignore[method-assign]
    try:
        yield
    finally:
        passes_module.accept = real
        Passes._accept_and_extend_chains = real_chains  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of the table."""

    name: str
    batch: int
    depth: int
    page_size: int = 64
    spec: SpecConfig = SpecConfig()
    graphs: bool = True
    prompt_len: int = 512
    num_new: int = 256
    grammar: str = ""  # that every output must match


class Run:
    """An engine in this thread with a batch of requests that all decode."""

    def __init__(self, model: Decoder, head: Head | None, case: Case, new_matcher: NewMatcher | None = None) -> None:
        length = case.prompt_len + case.num_new + 64
        pool = case.batch * (length + 8 * case.page_size) + 16 * case.page_size
        graphs = None if DEVICE.type == "cpu" else case.graphs
        config = EngineConfig(
            memory=MemoryConfig(page_size=case.page_size, pool_tokens=pool),
            sched=SchedConfig(
                context=length, max_running=case.batch, chunk=8192, overlap=case.depth == 1, graphs=graphs
            ),
            spec=case.spec,
        )
        self.resolved = resolve(config, model.traits, backend_of(config, DEVICE))
        own_head = head if self.resolved.spec.pair else None
        self.executor = TorchExecutor(model, self.resolved, DEVICE, own_head, new_matcher)
        self.engine = Engine(self.resolved, self.executor, SystemClock(), start_compiling=lambda text, done: done(""))
        self.num_tokens = [0] * case.batch
        self.num_ended = 0
        self.spent_s = {"launch": 0.0, "collect": 0.0}
        self.executor.launch = self._timed("launch")  # type: ignore[method-assign]
        self.executor.collect = self._timed("collect")  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(1)
        for number in range(case.batch):
            prompt = torch.randint(model.config.vocab_size, (case.prompt_len,), generator=generator).tolist()
            submit = Submit(
                request_id=str(number), tokens=tuple(prompt), max_new_tokens=case.num_new, grammar=case.grammar
            )
            self.engine.post(submit, self._hear)
        while self.num_tokens[-1] < 2 or min(self.num_tokens) < 2:
            self.engine.tick()

    def _timed(self, name: str) -> Callable[[Any], Any]:
        """A method of the executor that adds up its time."""
        method = getattr(self.executor, name)

        def timed(argument: Any) -> Any:
            began = time.perf_counter()
            result = method(argument)
            self.spent_s[name] += time.perf_counter() - began
            return result

        return timed

    def start_again(self) -> None:
        """Forget the times so far."""
        self.spent_s = dict.fromkeys(self.spent_s, 0.0)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self.num_tokens[int(event.request_id)] += len(event.tokens)
        elif isinstance(event, Finished):
            assert event.reason == "length", event
            self.num_ended += 1

    def ticks(self, most: int) -> list[tuple[float, int]]:
        """Seconds and tokens of each tick, while all requests run."""
        ticks = []
        while len(ticks) < most and not self.num_ended:
            before, began = sum(self.num_tokens), time.perf_counter()
            self.engine.tick()
            ticks.append((time.perf_counter() - began, sum(self.num_tokens) - before))
        return ticks

    def close(self) -> None:
        """Let the memory go."""
        while self.engine.has_work:
            self.engine.tick()
        self.executor.close()
        self.executor.runner = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache() if DEVICE.type == "cuda" else None


def measure(model: Decoder, head: Head | None, case: Case, new_matcher: NewMatcher | None = None) -> dict[str, Any]:
    """A cell: milliseconds per output token of a request while all run, as the median of equal parts of the run."""
    with accepting(case.spec.spec is not None):
        run = Run(model, head, case, new_matcher)
        run.start_again()
        ticks = run.ticks(10**6)
        waited, launched = run.spent_s["collect"], run.spent_s["launch"]
        spec, num_failed = run.engine.state.spec_counters.snapshot(), run.engine.state.totals.failed_steps
        run.close()
    assert num_failed == 0, f"{num_failed} steps failed, and were run again"
    steps, spent = len(ticks), sum(seconds for seconds, _ in ticks)
    size = max(1, steps // NUM_PARTS)
    parts = [ticks[start : start + size] for start in range(0, size * NUM_PARTS, size)]
    return {
        "case": case.name,
        "batch": case.batch,
        "depth": case.depth,
        "page_size": case.page_size,
        "graphs": case.graphs,
        "ms_per_token": statistics.median(_ms_per_token(part, case.batch) for part in parts if part),
        "ms_per_token_whole": _ms_per_token(ticks, case.batch),
        "ms_per_step": 1e3 * statistics.median(seconds for seconds, _ in ticks),
        "host_ms_per_step": 1e3 * (spent - waited) / steps,
        "launch_ms_per_step": 1e3 * launched / steps,
        "accept_length": spec.accept_length,
    }


def _ms_per_token(ticks: list[tuple[float, int]], batch: int) -> float:
    return 1e3 * sum(seconds for seconds, _ in ticks) * batch / sum(tokens for _, tokens in ticks)


def profiled(model: Decoder, head: Head | None, case: Case, num_steps: int = 30) -> dict[str, Any]:
    """Where the time of some steps goes."""
    with accepting(case.spec.spec is not None):
        run = Run(model, head, case)
        run.ticks(10)
        run.start_again()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as watched:
            began = time.perf_counter()
            steps = len(run.ticks(num_steps))
            torch.cuda.synchronize() if DEVICE.type == "cuda" else None
            spent = time.perf_counter() - began
        waited = run.spent_s["collect"]
        run.close()
    kernels: dict[str, list[float]] = {}
    syncs: dict[str, int] = {}
    for event in watched.events():
        if "ynchronize" in event.name:
            syncs[event.name] = syncs.get(event.name, 0) + 1
        if event.device_type.name == "CUDA":
            kernels.setdefault(event.name, []).append(event.device_time_total)
    busy_us = sum(sum(times) for times in kernels.values())
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:5]
    return {
        "case": case.name,
        "batch": case.batch,
        "depth": case.depth,
        "busy_share": busy_us / (spent * 1e6),
        "gpu_ms_per_step": busy_us / 1e3 / steps,
        "ms_per_step": 1e3 * spent / steps,
        "host_ms_per_step": 1e3 * (spent - waited) / steps,
        "kernels_per_step": sum(len(times) for times in kernels.values()) / steps,
        "syncs_per_step": {name: count / steps for name, count in syncs.items()},
        "largest": [
            {"kernel": name[:90], "us_per_step": sum(times) / steps, "calls_per_step": len(times) / steps}
            for name, times in largest
        ],
    }


def cases(batches: list[int], pages: list[int], *, is_short: bool) -> Iterator[Case]:
    """The table; a short one has overlapped steps of captured graphs alone."""
    for batch in batches:
        for depth in (1,) if is_short else (0, 1):
            yield Case(name="plain", batch=batch, depth=depth)
        if not is_short:
            yield Case(name="eagle3 2.5 (simulated)", batch=batch, depth=0, spec=CHAIN)
        for page_size in pages:
            yield Case(name="eagle3 2.5 (simulated)", batch=batch, depth=1, page_size=page_size, spec=CHAIN)
    if not is_short:
        yield Case(name="plain, no graphs", batch=batches[0], depth=1, graphs=False)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    shapes = {**SHAPES, **PARTS}
    parser.add_argument("--shapes", nargs="+", choices=list(shapes), default=["8b", "135m"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--weights", choices=list(WEIGHT_BYTES), default="bf16")
    parser.add_argument("--short", action="store_true", help="depth 1 with graphs alone, and no profiles")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU (rehearsal)"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "weights": args.weights}
    report |= {"cells": [], "profiles": [], "floors": []}
    print(f"{name}, torch {torch.__version__}", flush=True)

    def keep(kind: str, row: dict[str, Any]) -> None:
        report[kind].append(row)
        print(kind, json.dumps(row), flush=True)
        if args.out is not None:
            (args.out / "gpu_table.json").write_text(json.dumps(report, indent=1) + "\n")

    for shape_name in args.shapes:
        config = shapes[shape_name]
        backend = backend_of(EngineConfig(), DEVICE)
        model = Decoder(config, RandomState(config), args.weights, DEVICE, ops_of(backend))
        head = untrained_head("eagle3", model, args.weights, DEVICE, num_tokens=min(32000, config.vocab_size))
        for batch in args.batches:
            keep("floors", {"shape": shape_name, "batch": batch, **floor(config, args.weights, batch, 640)})
        for case in cases(args.batches, args.pages, is_short=args.short):
            keep("cells", {"shape": shape_name, **measure(model, head, case)})
        for batch in () if args.short else args.batches:
            for spec, title in ((SpecConfig(), "plain"), (CHAIN, "eagle3 2.5 (simulated)")):
                case = Case(name=title, batch=batch, depth=1, spec=spec)
                keep("profiles", {"shape": shape_name, **profiled(model, head, case)})
        del model, head
        gc.collect()
        for batch in () if args.no_transformers else args.batches:
            row = {"shape": shape_name, "case": "transformers", "batch": batch}
            keep("cells", {**row, "ms_per_token": transformers_ms(config, batch, DEVICE)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
