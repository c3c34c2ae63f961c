"""The serving mix on a GPU: `python -m bench.gpu_mix --out FOLDER`. Requests that come and go, in a closed loop.

Random weights in the shape of Llama-8B, bf16; 16, 64 and 256 requests at once, each followed by the next when it ends:
prompts of 40 to 1,500 tokens, outputs of 64 to 256. Plain, and with an EAGLE-3 head of 3 drafts whose accept length is
held at 2.5 (simulated: the head is random). Output tokens a second, time to first token, and time between a request's
token events. The first burst, which all starts at once, is left out; so is the end, when nobody follows.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_shapes import DEVICE, SHAPES, RandomState
from bench.gpu_table import CHAIN, accepting
from bench.heads import untrained_head
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.messages import Event, Finished, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of

PROMPT_LENS, OUTPUT_LENS = (40, 1500), (64, 256)
NUM_REQUESTS = {16: 200, 64: 400, 256: 1000}


@dataclass(slots=True)
class Asked:
    """A request under way."""

    at: float  # when it was made
    is_first_burst: bool
    heard_at: float | None = None  # its last tokens; None: none yet


class Mix:
    """An engine in this thread, and clients of whom each asks again as soon as it is answered."""

    def __init__(self, engine: Engine, vocab_size: int, at_once: int, num_requests: int) -> None:
        self._engine, self._vocab_size, self._num_left = engine, vocab_size, num_requests
        self._random = random.Random(1)
        self._asked: dict[str, Asked] = {}
        self.first_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self._failures: list[Event] = []
        self._num_tokens = 0
        self._num_unheard = at_once  # of the first burst
        self._window: list[
            tuple[float, int]
        ] = []  # (time, tokens so far): from the first burst's end to the last request
        for _ in range(at_once):
            self._ask(is_first_burst=True)

    def run(self) -> dict[str, float]:
        """Serve all requests."""
        while self._engine.has_work:
            self._engine.tick()
        if self._failures:
            raise RuntimeError(f"{len(self._failures)} requests did not end as they should: {self._failures[0]}")
        (began, before), (ended, after) = self._window[0], self._window[-1]
        return {
            "tokens_per_s": (after - before) / (ended - began),
            "ttft_ms_mean": statistics.mean(self.first_ms),
            "ttft_ms_p99": percentile(self.first_ms, 0.99),
            "itl_ms_p50": percentile(self.gaps_ms, 0.5),
            "itl_ms_p99": percentile(self.gaps_ms, 0.99),
        }

    def _ask(self, *, is_first_burst: bool = False) -> None:
        """Make a request, if any is left to make."""
        if not self._num_left:
            return
        self._num_left -= 1
        name, draw = str(self._num_left), self._random
        prompt = tuple(draw.randrange(self._vocab_size) for _ in range(draw.randint(*PROMPT_LENS)))
        self._asked[name] = Asked(time.perf_counter(), is_first_burst)
        submit = Submit(request_id=name, tokens=prompt, max_new_tokens=draw.randint(*OUTPUT_LENS))
        self._engine.post(submit, self._hear)

    def _hear(self, event: Event) -> None:
        now = time.perf_counter()
        if isinstance(event, Tokens):
            self._take_tokens(event, now)
        elif isinstance(event, Finished) and event.reason == "length":
            del self._asked[event.request_id]
            self._ask()
        else:
            self._failures.append(event)

    def _take_tokens(self, event: Tokens, now: float) -> None:
        asked = self._asked[event.request_id]
        if asked.is_first_burst:
            self._num_unheard -= asked.heard_at is None
        elif asked.heard_at is None:
            self.first_ms.append(1e3 * (now - asked.at))
        else:
            self.gaps_ms.append(1e3 * (now - asked.heard_at))
        asked.heard_at = now
        self._num_tokens += len(event.tokens)
        if self._num_left and not self._num_unheard:
            self._window.append((now, self._num_tokens))


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(model: Decoder, head: Head | None, at_once: int, num_requests: int, config: EngineConfig) -> dict[str, Any]:
    """One row of the table."""
    with accepting(head is not None):
        resolved = resolve(config, model.traits, backend_of(config, DEVICE))
        began = time.perf_counter()
        executor = TorchExecutor(model, resolved, DEVICE, head)
        start_s = time.perf_counter() - began
        engine = Engine(resolved, executor, SystemClock())
        mix = Mix(engine, model.config.vocab_size, at_once, num_requests)
        found = mix.run()
        totals, spec = engine.state.totals, engine.state.spec_counters.snapshot()
        executor.close()
    executor.runner = None  # type: ignore[assignment]
    gc.collect()
    torch.cuda.empty_cache() if DEVICE.type == "cuda" else None
    return {
        "case": "plain" if head is None else "eagle3 2.5 (simulated)",
        "at_once": at_once,
        **found,
        "steps": totals.steps,
        "accept_length": spec.accept_length,
        "start_s": start_s,
    }


def engine_config(args: argparse.Namespace, at_once: int, spec: SpecConfig) -> EngineConfig:
    """What a user would have, at this many requests; options that were given are passed on."""
    context = PROMPT_LENS[1] + OUTPUT_LENS[1] + 64
    given = {name: value for name in ("chunk", "itl_target_ms") if (value := getattr(args, name)) is not None}
    return EngineConfig(
        memory=MemoryConfig(pool_tokens=at_once * (context + 64)),
        sched=SchedConfig(context=context, max_running=at_once, **given),
        spec=spec,
    )


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--at-once", type=int, nargs="+", default=list(NUM_REQUESTS))
    parser.add_argument("--cases", nargs="+", choices=("plain", "eagle3"), default=["plain", "eagle3"])
    parser.add_argument("--requests", type=int, help="of each case; if absent 200, 400 and 1,000 at 16, 64 and 256")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--itl-target-ms", type=float)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU (rehearsal)"
    print(f"{name}, torch {torch.__version__}, {args.shape}, {args.weights}", flush=True)
    config = SHAPES[args.shape]
    model = Decoder(config, RandomState(config), args.weights, DEVICE, ops_of(backend_of(EngineConfig(), DEVICE)))
    head_weights = "fp32" if model.dtype == torch.float32 else "bf16"
    head = untrained_head("eagle3", model, head_weights, DEVICE, num_tokens=min(32000, config.vocab_size))
    rows = []
    for at_once in args.at_once:
        for case in args.cases:
            spec, used = (SpecConfig(), None) if case == "plain" else (CHAIN, head)
            num_requests = args.requests or NUM_REQUESTS.get(at_once, 4 * at_once)
            row = measure(model, used, at_once, num_requests, engine_config(args, at_once, spec))
            rows.append(row)
            print(_line(row), flush=True)
            if args.out is not None:
                (args.out / "gpu_mix.json").write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n")
    return 0


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['at_once']:4d} {row['case']:24s} {row['tokens_per_s']:8.0f} tok/s   "
        f"TTFT {row['ttft_ms_mean']:6.1f} / {row['ttft_ms_p99']:6.1f} ms   "
        f"inter-token {row['itl_ms_p50']:5.1f} / {row['itl_ms_p99']:5.1f} ms   "
        f"{row['steps']} steps, started in {row['start_s']:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
