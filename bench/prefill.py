"""Prefill beside decoding on a GPU: `python -m bench.prefill --out FOLDER`. What it is worth that chunks are captured.

Random weights in the shapes of SmolLM2-135M and Llama-8B, plain, 16 requests at once: prompts of 40 to 500 tokens, 64
tokens each, one more for each that ends. Output tokens a second, and milliseconds from a request to its first token,
with chunks captured and, side by side, with all steps that have some run operation by operation.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu_shapes import DEVICE, SHAPES, RandomState
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.messages import Event, Finished, Submit, Tokens
from roost.models.decoder import Decoder
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of

PROMPT_LENS = (40, 150, 300, 90, 500)
NUM_NEW = 64


class Load:
    """An engine that always has as many requests as fit."""

    def __init__(self, model: Decoder, at_once: int) -> None:
        config = EngineConfig(
            memory=MemoryConfig(pool_tokens=at_once * 1024), sched=SchedConfig(context=1024, max_running=at_once)
        )
        resolved = resolve(config, model.traits, backend_of(config, DEVICE))
        began = time.perf_counter()
        self.executor = TorchExecutor(model, resolved, DEVICE)
        self.start_s = time.perf_counter() - began
        self._engine = Engine(resolved, self.executor, SystemClock())
        self._generator, self._vocab_size = torch.Generator().manual_seed(1), model.config.vocab_size
        self._lens, self._numbers = itertools.cycle(PROMPT_LENS), itertools.count()
        self._asked: dict[str, float] = {}  # requests without a first token, and when they were made
        self._first_ms: list[float] = []
        self._num_tokens = 0
        for _ in range(at_once):
            self._ask()

    def run(self, num_ended: int) -> dict[str, float]:
        """Serve until so many more have ended."""
        self._first_ms, self._num_tokens, self._left = [], 0, num_ended
        began = time.perf_counter()
        while self._left > 0:
            self._engine.tick()
        spent = time.perf_counter() - began
        return {"tokens_s": self._num_tokens / spent, "first_ms": statistics.median(self._first_ms)}

    def _ask(self) -> None:
        """One more request."""
        size, name = (next(self._lens),), str(next(self._numbers))
        prompt = torch.randint(self._vocab_size, size, generator=self._generator).tolist()
        self._asked[name] = time.perf_counter()
        self._engine.post(Submit(request_id=name, tokens=tuple(prompt), max_new_tokens=NUM_NEW), self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Tokens):
            self._num_tokens += len(event.tokens)
            if event.request_id in self._asked:
                self._first_ms.append(1e3 * (time.perf_counter() - self._asked.pop(event.request_id)))
        elif isinstance(event, Finished):
            self._left -= 1
            self._ask()


def measure(shape: str, at_once: int, num_ended: int, repeats: int) -> dict[str, Any]:
    """Medians of turns that both take."""
    config = SHAPES[shape]
    ops = ops_of(backend_of(EngineConfig(), DEVICE))
    model = Decoder(config, RandomState(config), "bf16", DEVICE, ops)
    loads = {"captured": Load(model, at_once)}
    with patch("roost.config.resolve.mixed_sizes", return_value=[]):
        loads["eager"] = Load(model, at_once)
    for load in loads.values():
        load.run(2 * at_once)
    turns = [{name: load.run(num_ended) for name, load in loads.items()} for _ in range(repeats)]
    found: dict[str, Any] = {"shape": shape, "at_once": at_once}
    for name, load in loads.items():
        medians = {key: statistics.median(turn[name][key] for turn in turns) for key in turns[0][name]}
        found[name] = {**medians, "start_s": load.start_s}
        load.executor.close()
    return found


def main(argv: list[str]) -> None:
    """Print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default="135m,8b")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--ended", type=int, default=160, help="requests of a turn")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    rows = []
    for shape in args.shapes.split(","):
        row = measure(shape, args.at_once, args.ended, args.repeats)
        rows.append(row)
        for name in ("captured", "eager"):
            cell = row[name]
            print(
                f"{shape:5} {name:9} {cell['tokens_s']:9.0f} tokens/s, first token after {cell['first_ms']:6.1f} ms, "
                f"ready after {cell['start_s']:.1f} s",
                flush=True,
            )
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "prefill.json").write_text(json.dumps({"device": name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
