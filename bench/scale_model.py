"""Several GPUs, predicted: `python -m bench.scale_model [--gpus 2 4 8 16] [--json FILE]`. It runs on any machine.

Milliseconds per output token, prefill and sessions held, of shapes of 70B to 400B under tensor parallelism: the
measured costs of one H200 (`bench.scale_costs`) times the work of a rank's part, and messages over links whose rates
are assumed. First it predicts what was measured on one GPU, so that a reader sees how far to trust it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_shapes import BANDWIDTH, FLOPS, SHAPES
from bench.scale_costs import (
    CHUNK,
    DRAFT_VOCAB,
    KINDS,
    Pass,
    Row,
    Work,
    fit,
    left_out,
    measured_rows,
    prefill_of,
    round_of,
    rows_of,
    shown,
    work_of,
)
from bench.scale_shapes import (
    INPUTS_HELD,
    LARGE,
    STATES_HELD,
    memory_left,
    num_weights,
    rank_part,
    session_bytes,
    weight_bytes,
)
from roost.errors import ConfigError
from roost.kv.pages import ceil_div
from roost.models.decoder_layers import DecoderConfig
from roost.runner.memory import MEMORY_FRACTION

KNOWN = {**LARGE, **{name: SHAPES[name] for name in ("8b", "30b-a3b", "gpt-oss-20b", "qwen3.5-9b")}}
BATCHES = (1, 8, 64)
CACHES = ("auto", "fp8")  # --kv-cache-dtype; int8 takes the bytes of fp8
DTYPE_BYTES = torch.bfloat16.itemsize
HOST_MS, HOST_ROW_MS = 0.30, 0.0036  # of a step: gpu_table_h200_8b.json at batch 1; a row's share as in `make bench`


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What is assumed of the links between GPUs; rates are of one GPU, one way."""

    node_gpus: int = 8
    link_gbps: float = 370.0  # gigabytes a second
    link_latency_us: float = 10.0
    network_gbps: float = 45.0
    network_latency_us: float = 25.0

    def all_reduce_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds of a sum over all ranks: within nodes, then each GPU with its share between them."""
        return self._seconds(num_bytes, ranks, 2)

    def all_gather_s(self, num_bytes: float, ranks: int) -> float:
        """Seconds until every rank has all parts, which are so many bytes together."""
        return self._seconds(num_bytes, ranks, 1)

    def _seconds(self, num_bytes: float, ranks: int, ways: int) -> float:
        if ranks == 1:
            return 0.0
        near, nodes = min(ranks, self.node_gpus), ceil_div(ranks, self.node_gpus)
        seconds = self.link_latency_us / 1e6 + ways * (near - 1) / near * num_bytes / (self.link_gbps * 1e9)
        if nodes > 1:
            seconds += self.network_latency_us / 1e6
            seconds += ways * (nodes - 1) / nodes * num_bytes / near / (self.network_gbps * 1e9)
        return seconds


def messages_s(config: DecoderConfig, links: Links, ranks: int, tokens: int, num_logits: int) -> float:
    """Seconds of a pass's messages: a sum behind the embedding, two in every layer, and the logits put together."""
    sums = 1 + 2 * config.num_layers
    hidden = links.all_reduce_s(tokens * config.hidden_size * DTYPE_BYTES, ranks)
    return sums * hidden + links.all_gather_s(num_logits * config.vocab_size * DTYPE_BYTES, ranks)


def draft_messages_s(config: DecoderConfig, links: Links, ranks: int, batch: int, num_steps: int) -> float:
    """The same of a draft head's passes: a layer, and its own vocabulary."""
    seconds = 0.0
    for tokens in (batch * (num_steps + 1), *(batch,) * (num_steps - 1)):
        seconds += 3 * links.all_reduce_s(tokens * config.hidden_size * DTYPE_BYTES, ranks)
        seconds += links.all_gather_s(batch * min(DRAFT_VOCAB, config.vocab_size) * DTYPE_BYTES, ranks)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of the model."""

    costs: Work
    links: Links
    weights: str
    context: int
    accept_length: float
    num_steps: int
    prompt: int
    contexts: tuple[int, ...]
    gpu_bytes: float

    def step_ms(self, work: Work, messages: float, batch: int) -> float:
        """A step: the device and then the links, or the host where that takes longer."""
        return max(1e3 * (float(self.costs @ work) + messages), HOST_MS + batch * HOST_ROW_MS)


def predicted(name: str, config: DecoderConfig, ranks: int, asked: Question) -> dict[str, Any]:
    """A line of the table; what does not fit has no times."""
    row: dict[str, Any] = {"shape": name, "gpus": ranks, "weights": asked.weights}
    if asked.weights != "bf16" and any(kind.feed_forward is not None for kind in config.layers):
        return row | {"refused": "on a GPU experts are kept in bf16 alone"}
    try:
        part = rank_part(config, ranks)
    except ConfigError as error:
        return row | {"refused": str(error)}
    row["weight_gb"] = weight_bytes(part, asked.weights) / 1e9
    left = memory_left(part, config.vocab_size, asked.weights, asked.gpu_bytes)
    row["sessions"] = {
        kept: {context: left // session_bytes(part, context, kept) for context in asked.contexts} for kept in CACHES
    }
    fits = left // session_bytes(part, asked.context, "auto")
    if not fits:
        return row | {"refused": f"{row['weight_gb']:.0f} GB of weights a GPU leave no room for KV"}
    row["batches"] = [_batch(config, part, ranks, batch, asked) for batch in BATCHES if batch <= fits]
    chunks = [min(CHUNK, asked.prompt - at) for at in range(0, asked.prompt, CHUNK)]
    links = sum(messages_s(config, asked.links, ranks, tokens, 1) for tokens in chunks)
    seconds = float(asked.costs @ prefill_of(part, asked.weights, asked.prompt)) + links
    return row | {"prefill_tokens_s": asked.prompt / seconds}


def _batch(config: DecoderConfig, part: DecoderConfig, ranks: int, batch: int, asked: Question) -> dict[str, float]:
    """Milliseconds per token of so many requests at once, plain and with drafts."""
    plain_links = messages_s(config, asked.links, ranks, batch, batch)
    work = work_of(part, asked.weights, Pass(batch=batch, row_tokens=1, seen=asked.context))
    nodes = batch * (asked.num_steps + 1)
    links = messages_s(config, asked.links, ranks, nodes, nodes)
    links += draft_messages_s(config, asked.links, ranks, batch, asked.num_steps)
    drafted = round_of(part, asked.weights, batch, asked.context, asked.num_steps, ranks)
    return {
        "batch": batch,
        "ms": asked.step_ms(work, plain_links, batch),
        "ms_links": 1e3 * plain_links,
        "ms_drafts": asked.step_ms(drafted, links, batch) / asked.accept_length,
    }


def held_against(rows: Sequence[Row], costs: Work, without: Sequence[float | None]) -> Iterator[dict[str, Any]]:
    """Every measurement beside what the model says of it, and what it says without having seen that shape."""
    for row, unseen in zip(rows, without, strict=True):
        yield {
            "shape": row.shape,
            "weights": row.form,
            "what": row.what,
            "measured_ms": row.ms,
            "predicted_ms": 1e3 * float(costs @ row.work) / row.tokens,
            "error": float(costs @ row.work) / row.seconds - 1,
            "error_left_out": None if unseen is None else unseen / row.seconds - 1,
        }


def print_costs(costs: Work) -> None:
    """What each kind of work costs."""
    print("Costs, fitted to what was measured on one H200 (bench/results, docs/BENCHMARKS.md):\n")
    for number, (kind, _) in enumerate(KINDS):
        print(f"  {kind:32} {shown(number, costs[number])}")


def print_check(checks: Sequence[dict[str, Any]]) -> None:
    """How far to trust it."""
    print("\nPredicted against measured, ms a token. Left out: by costs fitted without the shape, if others tell.\n")
    print(f"  {'shape':12} {'':5} {'':24} {'measured':>9} {'predicted':>9} {'error':>8} {'left out':>9}")
    for row in checks:
        out = "–" if row["error_left_out"] is None else f"{row['error_left_out']:+.0%}"
        print(
            f"  {row['shape']:12} {row['weights']:5} {row['what']:24} {row['measured_ms']:9.3f} "
            f"{row['predicted_ms']:9.3f} {row['error']:+8.1%} {out:>9}"
        )
    for name, key in (("fitted", "error"), ("left out", "error_left_out")):
        errors = sorted(abs(row[key]) for row in checks if row[key] is not None)
        if errors:
            print(f"  {name}: {len(errors)} errors, median {statistics.median(errors):.1%}, largest {errors[-1]:.0%}")


def assumptions(asked: Question) -> list[str]:
    """What was not measured here."""
    links = asked.links
    return [
        f"links: {links.link_gbps:g} GB/s a GPU, one way (--link-gbps): 2 to 8 H100 reach 365 to 370 in rings of NCCL",
        "  (github.com/NVIDIA/nccl, issue 1455)",
        f"  {links.link_latency_us:g} µs more a message (--link-latency-us): two H100 took 6 in CUDA graphs,",
        "  more of them longer (issue 1259 there)",
        f"network, between nodes of {links.node_gpus} GPUs (--node-gpus): a card of 400 Gb/s for each GPU,",
        f"  {links.network_gbps:g} GB/s of its 50 (--network-gbps) and {links.network_latency_us:g} µs more a message"
        " (--network-latency-us), a guess",
        "all-reduce: latency + bytes x 2(n-1)/n / rate; each GPU hands its share to other nodes; nothing overlaps",
        "messages: tokens x hidden x 2 bytes behind embedding, attention and feed-forward; logits gathered in 2 bytes",
        "parts: every matrix is split evenly, each expert by its width; norms and routers are whole on each rank;",
        "  KV heads are copied where there are fewer than ranks; the tokens of a step hit experts evenly",
        "  norms stay as cheap as where they are fused with a projection, though a message comes between",
        f"host: {HOST_MS} ms a step and {1e3 * HOST_ROW_MS:g} µs a row, beside the device; plans reach ranks at once",
        f"drafts: EAGLE-3, chains of {asked.num_steps}, {asked.accept_length:g} tokens a round (--accept-length)",
        f"load: requests of {asked.context} tokens (--context); prefill of one prompt of {asked.prompt} (--prompt)",
        f"memory: {asked.gpu_bytes / 2**30:.0f} GiB a GPU (--gpu-gib), {MEMORY_FRACTION:g} of it used; workspace as"
        " the engine bounds it; no draft head;",
        f"  a hybrid's session holds {STATES_HELD} states and the inputs of {INPUTS_HELD} tokens",
        "never measured, so by the same costs: prefill of mixtures, experts as narrow as a rank's",
    ]


def print_table(name: str, config: DecoderConfig, rows: Sequence[dict[str, Any]], asked: Question) -> None:
    """A shape on all numbers of GPUs."""
    size, active = num_weights(config) / 1e9, num_weights(config, is_active=True) / 1e9
    print(f"\n{name}: {size:.1f}B weights, {active:.1f}B of them multiplied with a token, {asked.weights}")
    held = "  ".join(f"{kept} {' / '.join(f'{context:,}' for context in asked.contexts)}" for kept in CACHES)
    print(f"  GPUs  GB each  ms at 1 / 8 / 64      of it links         with drafts         prefill/s  sessions: {held}")
    for row in rows:
        if "refused" in row:
            print(f"  {row['gpus']:4}  {row['refused']}")
            continue
        times = (" / ".join(f"{each[key]:.2f}" for each in row["batches"]) for key in ("ms", "ms_links", "ms_drafts"))
        sessions = "  ".join(" / ".join(f"{n:,}" for n in row["sessions"][kept].values()) for kept in CACHES)
        print(
            f"  {row['gpus']:4}  {row['weight_gb']:7.1f}  {'  '.join(f'{each:20}' for each in times)}"
            f"{row['prefill_tokens_s']:9,.0f}  {sessions}"
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(KNOWN), default=list(LARGE))
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--weights", nargs="+", choices=["bf16", "fp8"], default=["bf16"])
    parser.add_argument("--context", type=int, default=2048, help="tokens of a request that decodes")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 131072], help="tokens of sessions held")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--accept-length", type=float, default=2.5, help="tokens a round")
    parser.add_argument("--spec-steps", type=int, default=3, help="drafts a round")
    parser.add_argument(
        "--gpu-bandwidth", type=float, default=BANDWIDTH / 1e12, help="TB/s; costs of bytes scale with it"
    )
    parser.add_argument(
        "--gpu-tflops", type=float, default=FLOPS / 1e12, help="bf16; costs of operations scale with it"
    )
    parser.add_argument("--gpu-gib", type=float, default=139.8, help="a GPU's memory")
    for link in fields(Links):
        told = {"gpus": "of a node", "gbps": "gigabytes a second of one GPU, one way", "us": "of a message"}
        flag, unit = f"--{link.name.replace('_', '-')}", link.name.rpartition("_")[2]
        parser.add_argument(flag, type=type(link.default), default=link.default, help=told[unit])
    also = "files of bench.gpu_table to hold it against, which no cost is fitted to"
    parser.add_argument("--also", type=Path, nargs="+", default=[], metavar="FILE", help=also)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 0 if name.endswith("latency_us") else 1e-9
        each = value if isinstance(value, list) else [value]
        if any(isinstance(number, int | float) and number < least for number in each):
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value}")
    return args


def scaled(costs: Work, args: argparse.Namespace) -> Work:
    """The costs of a GPU with other rates than those that were measured."""
    faster = {"TB/s": args.gpu_bandwidth / (BANDWIDTH / 1e12), "TFLOP/s": args.gpu_tflops / (FLOPS / 1e12), "us": 1.0}
    found: Work = costs / np.array([faster[unit] for _, unit in KINDS])
    return found


def main() -> int:
    """Check it, say what it assumes, predict."""
    args = parse(sys.argv[1:])
    rows = measured_rows()
    costs = fit(rows)
    also = [row for table in args.also for row in rows_of(table)]
    unseen = [*left_out(rows), *(float(costs @ row.work) for row in also)]
    checks = list(held_against([*rows, *also], costs, unseen))
    print_costs(costs)
    print_check(checks)
    links = Links(**{link.name: getattr(args, link.name) for link in fields(Links)})
    report: dict[str, Any] = {"costs": dict(zip((kind for kind, _ in KINDS), costs.tolist(), strict=True))}
    report |= {"checks": checks, "links": asdict(links), "assumed": [], "predicted": []}
    for weights in args.weights:
        asked = Question(
            costs=scaled(costs, args),
            links=links,
            weights=weights,
            context=args.context,
            accept_length=args.accept_length,
            num_steps=args.spec_steps,
            prompt=args.prompt,
            contexts=tuple(args.contexts),
            gpu_bytes=args.gpu_gib * 2**30,
        )
        if not report["assumed"]:
            report["assumed"] = assumptions(asked)
            print("\nassumed:", *report["assumed"], sep="\n  ")
        for name in args.shapes:
            config = KNOWN[name]
            found = [predicted(name, config, ranks, asked) for ranks in args.gpus]
            print_table(name, config, found, asked)
            report["predicted"] += found
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
