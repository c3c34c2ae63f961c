"""Training a head for a larger model: `python -m bench.train_shapes [--shape 8b] [--json PATH]`. One GPU, one run.

Random weights in the shape of a model; a head of its sizes learns from rows of random tokens. Measures updates: tokens
a second, the share of the target's pass, peak memory. Then the other way to have the target's hidden states, reading
them from a file: bytes a token, and the rate at which they are read and copied to the device. The file was just
written, so that a read may come from the page cache: the rate is an upper bound of the disk's. `--shape tiny` rehearses
on a CPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_shapes import DEVICE, SHAPES, RandomState
from roost.config.options import EngineConfig
from roost.models.decoder import Decoder
from roost.startup import backend_of, ops_of
from roost.train.head import TrainableHead
from roost.train.head_checkpoint import head_shape, warm_start
from roost.train.loop import Recipe, Trainer, TrainingState
from roost.train.losses import LOSSES
from roost.train.packing import PackedRows
from roost.train.target import run_target
from roost.weights.draft import default_aux_layers

ANSWER_LEN = 512  # tokens of an answer in a row, half of them the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    shape: str
    row_len: int
    rows: int  # of a batch
    micro_rows: int | None
    num_tokens: int  # of the draft vocabulary
    num_steps: int
    loss: str
    updates: int


def random_rows(number: int, row_len: int, vocab_size: int) -> PackedRows:
    """Rows of random answers."""
    place = np.arange(row_len)
    shape = (number, row_len)
    return PackedRows(
        tokens=np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32),
        owners=np.broadcast_to(place // ANSWER_LEN, shape).astype(np.int32),
        is_said=np.broadcast_to(place % ANSWER_LEN >= ANSWER_LEN // 2, shape).copy(),
    )


def make_trainer(plan: Plan) -> tuple[Trainer, Decoder, torch.Tensor]:
    """A trainer of a new head for a random model, the model, and the draft vocabulary."""
    config = SHAPES[plan.shape]
    weights = "bf16" if DEVICE.type == "cuda" else "fp32"
    state = RandomState(config)
    model = Decoder(config, state, weights, DEVICE, ops_of(backend_of(EngineConfig(), DEVICE)))
    aux_layers = default_aux_layers(len(config.layers))
    vocabulary = torch.arange(min(plan.num_tokens, config.vocab_size))
    shape = head_shape(config, len(aux_layers), len(vocabulary), config.intermediate_size)
    on_host = {name: state[name].cpu() for name in state if needed(name, len(config.layers))}
    head = TrainableHead(shape, warm_start(on_host, config, shape, vocabulary), DEVICE)
    recipe = Recipe(
        num_steps=plan.num_steps, loss=plan.loss, batch_rows=plan.rows, micro_rows=plan.micro_rows, epochs=10**6
    )
    return Trainer(model, head, aux_layers, vocabulary.to(DEVICE), recipe), model, vocabulary.to(DEVICE)


def needed(name: str, num_layers: int) -> bool:
    """Whether a head starts from this weight of the target."""
    return f"layers.{num_layers - 1}." in name or "layers." not in name


def measure_updates(trainer: Trainer, plan: Plan, vocab_size: int) -> dict[str, float]:
    """Seconds of an update and of compiling, and the most memory that was taken."""
    rows = random_rows(plan.rows * (plan.updates + 2), plan.row_len, vocab_size)
    times: list[float] = []
    peaks: list[float] = []

    def report(_standing: TrainingState) -> None:
        wait()
        times.append(time.perf_counter())
        peaks.append(peak_gb())

    reset_peak()
    times.append(time.perf_counter())
    trainer.train(
        rows,
        random_rows(plan.micro_rows or plan.rows, plan.row_len, vocab_size),
        report=report,
        evaluated=lambda _standing, _state: None,
        is_enough=lambda: len(times) > plan.updates + 1,
    )
    spent = np.diff(times)
    return {
        "update_s": float(np.median(spent[2:])) if len(spent) > 2 else float(spent[-1]),
        "compile_s": float(spent[0]),
        "peak_gb": peaks[-1],
        "peak_with_evaluation_gb": peak_gb(),
    }


def measure_target(model: Decoder, plan: Plan, vocabulary: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Seconds of the target's pass over a batch, and what would be kept of it on disk."""
    part = plan.micro_rows or plan.rows
    rows = random_rows(part, plan.row_len, model.config.vocab_size)
    tokens, owners = (torch.from_numpy(column).to(DEVICE) for column in (rows.tokens, rows.owners))
    aux_layers, spent = default_aux_layers(len(model.config.layers)), []
    for _ in range(4):
        wait()
        began = time.perf_counter()
        outputs = run_target(model, tokens.to(torch.int64), owners, aux_layers, vocabulary)
        wait()
        spent.append(time.perf_counter() - began)
    # the last hidden state stands for the logits, which are much larger, and are computed again from it
    last = torch.zeros_like(outputs.features[..., : model.config.hidden_size])
    return float(np.median(spent[1:])) * plan.rows / part, {"features": outputs.features.cpu(), "last": last.cpu()}


def measure_disk(kept: dict[str, torch.Tensor], num_tokens: int) -> dict[str, float]:
    """Bytes a token, and how fast they are written, read and copied to the device."""
    raw = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in kept.values())
    with tempfile.NamedTemporaryFile() as file:
        began = time.perf_counter()
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - began
        reads = []
        for _ in range(3):
            began = time.perf_counter()
            torch.from_numpy(np.fromfile(file.name, dtype=np.uint8)).to(DEVICE)
            wait()
            reads.append(time.perf_counter() - began)
    return {
        "bytes_per_token": len(raw) / num_tokens,
        "write_gb_s": len(raw) / written / 1e9,
        "read_gb_s": len(raw) / min(reads) / 1e9,
        "read_tokens_s": num_tokens / min(reads),
    }


def wait() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    """Forget how much memory was taken."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    """The most memory of the device that was taken."""
    return torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else 0.0


def measure(plan: Plan) -> dict[str, Any]:
    """A row of the table."""
    torch.manual_seed(0)
    trainer, model, vocabulary = make_trainer(plan)
    num_weights = sum(weight.numel() for weight in trainer.head.parameters())
    updates = measure_updates(trainer, plan, model.config.vocab_size)
    num_tokens = plan.rows * plan.row_len
    target_s, kept = measure_target(model, plan, vocabulary)
    disk = measure_disk(kept, kept["last"].shape[0] * plan.row_len)
    return {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU (rehearsal)",
        "shape": plan.shape,
        "row_tokens": plan.row_len,
        "batch_rows": plan.rows,
        "micro_rows": plan.micro_rows,
        "loss": plan.loss,
        "head_weights": num_weights,
        "tokens_s": num_tokens / updates["update_s"],
        "target_share": target_s / updates["update_s"],
        "target_tokens_s": num_tokens / target_s,
        **updates,
        **disk,
        "gb_for_10m_tokens": disk["bytes_per_token"] * 1e7 / 1e9,
    }


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--micro-rows", type=int, default=None)
    parser.add_argument("--draft-vocabulary", type=int, default=32_000)
    parser.add_argument("--unrolled-steps", type=int, default=7)
    parser.add_argument("--loss", choices=LOSSES, default="coupled")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    row = measure(
        Plan(
            shape=args.shape,
            row_len=args.row_tokens,
            rows=args.batch_rows,
            micro_rows=args.micro_rows,
            num_tokens=args.draft_vocabulary,
            num_steps=args.unrolled_steps,
            loss=args.loss,
            updates=args.updates,
        )
    )
    for name, value in row.items():
        print(f"{name:18} {value:,.3f}" if isinstance(value, float) else f"{name:18} {value}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(row, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
