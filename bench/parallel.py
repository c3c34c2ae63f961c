"""Tensor parallelism measured on one machine: `python -m bench.parallel [--json FILE]`.

First the parallel path in a group of one rank, against none, by turns in one process: plans are encoded, steps hashed,
and behind every projection that ranks would sum there is an all-reduce (NCCL on a GPU, within captured graphs; gloo on
a CPU). Then two ranks over gloo, on one GPU where there is one, against one process. Each part says first whether both
answer alike; times of a part that does not are worth nothing.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from bench import gpu_table
from bench.gpu_shapes import DEVICE, SHAPES, RandomState
from bench.gpu_table import Case, Run, measure
from roost.cli.random_model import write_random_model
from roost.config.options import GLOO, NCCL, EngineConfig, MemoryConfig, ModelConfig, SchedConfig
from roost.layers.linear import Linear
from roost.layers.ops import Ops
from roost.messages import Event, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.decoder_layers import Loader
from roost.parallel.executor import GroupExecutor
from roost.parallel.group import DistributedGroup
from roost.parallel.ranks import Ranks
from roost.runner.executor import TorchExecutor
from roost.sampling.params import SamplingParams
from roost.startup import Running, backend_of, ops_of, start

HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS = 1024, 2816, 12, 16, 8  # of the model of the second part
PROMPT = tuple(range(1, 65))
NUM_NEW = 96


@contextmanager
def summing() -> Iterator[None]:
    """Models that are made meanwhile sum over their group, though it be of one rank."""

    def summed(self: Loader, project: Linear) -> Linear:
        ops = self.ops
        return lambda x: ops.group.all_reduce(ops.linear(x, project))

    with patch.object(Loader, "summed", summed):
        yield


class Alone:
    """A group of one rank, and executors that go through it."""

    def __init__(self) -> None:
        transport = NCCL if DEVICE.type == "cuda" else GLOO
        self._ranks = Ranks(1)
        store = self._ranks.folder / "store"
        self.group = DistributedGroup(0, 1, transport=transport, device=DEVICE, store=store)

    def executor(self, *args: Any) -> GroupExecutor:
        """In place of a `TorchExecutor`."""
        executor = _Kept(TorchExecutor(*args), self.group, self._ranks)
        self._ranks.begin(lambda now: None, lambda: None)
        return executor

    def close(self) -> None:
        """End its threads."""
        self._ranks.close()


class _Kept(GroupExecutor):
    """One that leaves its ranks to the next."""

    runner = None  # a run lets go of it

    def close(self) -> None:
        """End its own thread alone."""
        self._inner.close()
        self._inner.runner = None  # type: ignore[assignment]


def said(model: Decoder, case: Case) -> dict[str, list[int]]:
    """What a case's requests say."""
    found: dict[str, list[int]] = {}
    hear = Run._hear

    def hears(self: Run, event: Event) -> None:
        if isinstance(event, Tokens):
            found.setdefault(event.request_id, []).extend(event.tokens)
        hear(self, event)

    with patch.object(Run, "_hear", hears):
        Run(model, None, case).close()
    return found


def one_rank(name: str, weights: str, batches: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """The overhead of a group of one rank."""
    config, alone = SHAPES[name], Alone()
    ops: Ops = ops_of(backend_of(EngineConfig(), DEVICE))

    def made(ops: Ops) -> Decoder:
        torch.manual_seed(0)
        return Decoder(config, RandomState(config), weights, DEVICE, ops)

    with summing():
        inside = made(replace(ops, group=alone.group))
    through = patch.object(gpu_table, "TorchExecutor", alone.executor)
    # where an all-reduce stands, a sum cannot be one operation with the projection: the same without its transport
    with patch.object(Loader, "summed", lambda self, project: lambda x: self.ops.linear(x, project)):
        apart = made(ops)
    plain = made(ops)
    case = Case(name="equal", batch=2, depth=1, prompt_len=48, num_new=24)
    expected = said(apart, case)
    with through:
        found = said(inside, case)
    yield {"part": "one rank, answers", "shape": name, "are_equal": found == expected}
    for batch in batches:
        case = Case(name="plain", batch=batch, depth=1, prompt_len=128, num_new=128)
        times: dict[str, list[float]] = {"none": [], "apart": [], "group": []}
        for _ in range(repeats):
            times["none"].append(measure(plain, None, case)["ms_per_token"])
            times["apart"].append(measure(apart, None, case)["ms_per_token"])
            with through:
                times["group"].append(measure(inside, None, case)["ms_per_token"])
        ms = {each: statistics.median(found) for each, found in times.items()}
        row = {"part": "one rank", "shape": name, "batch": batch, "ms_none": ms["none"], "ms_unfused": ms["apart"]}
        yield {**row, "ms_group": ms["group"], "overhead_percent": 100 * (ms["group"] / ms["none"] - 1)}
    alone.close()


def write_model(folder: Path) -> None:
    """A random model of some size, over the vocabulary of the smallest."""
    write_random_model(folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": LAYERS, "head_dim": HIDDEN // HEADS}
    config |= {**sizes, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (folder / "config.json").write_text(json.dumps(config))
    kv, vocab = HIDDEN * KV_HEADS // HEADS, config["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, HIDDEN), "lm_head": (vocab, HIDDEN), "model.norm": (HIDDEN,)}
    for number in range(LAYERS):
        prefix = f"model.layers.{number}."
        for each, size in {"q": HIDDEN, "k": kv, "v": kv, "o": HIDDEN}.items():
            shapes[f"{prefix}self_attn.{each}_proj"] = (size, HIDDEN)
        shapes |= {f"{prefix}mlp.{each}_proj": (WIDE, HIDDEN) for each in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = (HIDDEN, WIDE)
        shapes |= {f"{prefix}{each}_layernorm": (HIDDEN,) for each in ("input", "post_attention")}
    drawn = torch.Generator().manual_seed(0)
    tensors = {f"{each}.weight": torch.randn(size, generator=drawn) * size[-1] ** -0.5 for each, size in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


def answers(running: Running, number: int, **sampling: Any) -> tuple[list[list[int]], float]:
    """What some requests say side by side, and milliseconds for each token of one."""
    said: list[list[int]] = [[] for _ in range(number)]
    for each, tokens in enumerate(said):

        def hear(event: Event, tokens: list[int] = tokens) -> None:
            if isinstance(event, Tokens):
                tokens.extend(event.tokens)

        params = SamplingParams(**sampling, seed=each)
        submit = Submit(request_id=f"{time.monotonic_ns()}-{each}", tokens=(*PROMPT, each + 1), max_new_tokens=NUM_NEW)
        running.engine.post(replace(submit, sampling=params), hear)
    while not all(said):
        running.engine.tick()
    began, before = time.perf_counter(), sum(map(len, said))
    while running.engine.has_work:
        running.engine.tick()
    spent = time.perf_counter() - began
    return said, 1e3 * spent * number / (sum(map(len, said)) - before)


def two_ranks(weights: str, batches: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Two ranks over gloo against one process."""
    on_gpu = DEVICE.type == "cuda"
    with tempfile.TemporaryDirectory() as place:
        write_model(Path(place))
        model = ModelConfig(model=place, weights=weights, threads=None if on_gpu else 1)
        sched = SchedConfig(max_running=max(2, *batches), graphs=False if on_gpu else None, context=512)
        config = EngineConfig(model=model, memory=MemoryConfig(pool_tokens=512 * (4 + sched.max_running)), sched=sched)
        engines = {
            tp: start(replace(config, model=replace(model, tp=tp, tp_transport=GLOO if tp > 1 else None)))
            for tp in (1, 2)
        }
        one, two = engines.values()
        for kind, sampling in {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0}}.items():
            pairs = zip(answers(one, 2, **sampling)[0], answers(two, 2, **sampling)[0], strict=True)
            same = [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), NUM_NEW) for pair in pairs]  # noqa: B905
            yield {"part": f"two ranks, {kind} answers", "are_equal": min(same) == NUM_NEW, "equal_tokens": same}
        for batch in batches:
            times: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(repeats):
                for tp, running in engines.items():
                    times[tp].append(answers(running, batch, temperature=0.0)[1])
            ms = {f"ms_tp_{tp}": statistics.median(found) for tp, found in times.items()}
            threads = {tp: running.settings["threads"] for tp, running in engines.items()}
            yield {"part": "two ranks", "batch": batch, **ms, "threads_of_a_rank": threads[2]}
        for running in engines.values():
            running.executor.close()


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    on_gpu = DEVICE.type == "cuda"
    parser.add_argument("--shape", choices=list(SHAPES), default="8b" if on_gpu else "tiny")
    parser.add_argument("--weights", default="bf16" if on_gpu else "fp32")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64] if on_gpu else [1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=("one", "two"), default=["one", "two"])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name() if on_gpu else "CPU"
    report: dict[str, Any] = {"device": device, "torch": torch.__version__, "weights": args.weights, "rows": []}
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "one": lambda: one_rank(args.shape, args.weights, args.batches, args.repeats),
        "two": lambda: two_ranks(args.weights, args.batches, args.repeats),
    }
    print(f"{device}, torch {torch.__version__}, {args.weights}", flush=True)
    for part in args.parts:
        for row in parts[part]():
            report["rows"].append(row)
            shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            print("  ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row.get("are_equal", True) for row in report["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
