"""What a step costs one GPU: a sum of its work, kind by kind, times what each kind of work was measured to cost.

The costs (seconds a byte of weights, an operation, a layer …) are fitted to steps and prefills that were measured on
one H200, each by its relative error. Nothing is known of several GPUs: a rank's step is that of its part of a model.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.gpu_shapes import SHAPES, WEIGHT_BYTES, experts_of
from bench.scale_shapes import PARTS, dense_and_expert
from roost.kv.pages import ceil_div
from roost.layers.linear import head_form
from roost.models.decoder import kv_shapes
from roost.models.decoder_layers import DecoderConfig

RESULTS = Path(__file__).parent / "results"
RIDGE = 150  # tokens from which on a product in bf16 takes its operations' time, not that of its bytes
PAIRS_MAX = 128  # of token and expert, up to which each is by itself: kernels/experts.py
CHUNK = 2048  # most tokens of a prompt in a step
DRAFT_VOCAB = 32000  # of the head in the measured rounds
TABLES = ("8b", "fp8", "experts", "hybrid", "sinks")  # bench/results/gpu_table_h200_….json
MEASURED_LEN = 640  # tokens of a request half way: 512 of prompt, and half of 256
# docs/BENCHMARKS.md: what has no file. The newer table of the small shape: plain, then rounds of 2.5 tokens
SMALL = {1: (0.53, 0.38), 8: (0.75, 0.41), 64: (1.05, 0.66)}
PREFILLS = (("8b", 512, 41100.0), ("8b", 4096, 41600.0), ("8b", 32768, 24200.0), ("qwen3.5-9b", 4000, 15900.0))
LONG_CONTEXT = ("8b", 32768, 4.99)  # milliseconds a token at batch 1

KINDS = (  # of work, and how a cost is shown: a rate of so many units, or so many microseconds each
    ("bf16 weights read for 1 token", "TB/s"),
    ("bf16 weights read for several", "TB/s"),
    ("fp8 weights read for 1 token", "TB/s"),
    ("fp8 weights read for several", "TB/s"),
    ("experts read pair by pair", "TB/s"),
    ("experts read, pairs sorted", "TB/s"),
    ("KV read", "TB/s"),
    ("states read", "TB/s"),
    ("operations of products", "TFLOP/s"),
    ("operations of attention", "TFLOP/s"),
    ("layers of 1 token", "us"),
    ("layers of several", "us"),
    ("recurrences, beside that", "us"),
    ("tokens of a row in a recurrence", "us"),
    ("mixtures, beside that", "us"),
    ("passes of a draft head", "us"),
)
NUMBERS = {name: number for number, (name, _) in enumerate(KINDS)}
Work = npt.NDArray[np.float64]  # how much there is of each kind, in bytes, operations or numbers of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A forward pass of so many rows, each of so many tokens behind so many others."""

    batch: int
    row_tokens: int
    seen: float  # tokens before, on average
    num_logits: int | None = None  # tokens whose logits are made; None: all

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.batch * self.row_tokens


def _none() -> Work:
    return np.zeros(len(KINDS))


def _product(work: Work, numbers: float, tokens: int, form: str) -> None:
    """Add a product by so many numbers: the time of its bytes or of its operations."""
    if tokens > RIDGE:
        work[NUMBERS["operations of products"]] += 2 * numbers * tokens / (2 if form == "fp8" else 1)
        return
    work[NUMBERS[f"{form} weights read for {_of(tokens)}"]] += numbers * WEIGHT_BYTES[form]


def _of(tokens: int) -> str:
    return "1 token" if tokens == 1 else "several"


def _experts(work: Work, config: DecoderConfig, number: int, tokens: int) -> None:
    """Add a layer's mixture, whose experts are hit evenly."""
    kind = config.layers[number]
    experts = experts_of(kind)
    if experts is None:
        return
    one = dense_and_expert(config, kind)[1]
    pairs = tokens * experts.num_active
    hit = experts.num_experts * (1 - (1 - experts.num_active / experts.num_experts) ** tokens)
    work[NUMBERS["mixtures, beside that"]] += 1
    if pairs <= min(PAIRS_MAX, experts.num_experts // 2):
        work[NUMBERS["experts read pair by pair"]] += hit * one * 2  # what a cache still has of one is not read again
    elif pairs <= RIDGE * hit:
        work[NUMBERS["experts read, pairs sorted"]] += hit * one * 2
    else:
        work[NUMBERS["operations of products"]] += 2 * one * pairs


def work_of(config: DecoderConfig, form: str, run: Pass) -> Work:
    """The work of a forward pass, logits included."""
    work = _none()
    for number, (kind, kv) in enumerate(zip(config.layers, kv_shapes(config, torch.bfloat16), strict=True)):
        work[NUMBERS[f"layers of {_of(run.tokens)}"]] += 1
        _product(work, dense_and_expert(config, kind)[0], run.tokens, form)
        _experts(work, config, number, run.tokens)
        if kind.delta is not None:
            work[NUMBERS["recurrences, beside that"]] += 1
            work[NUMBERS["tokens of a row in a recurrence"]] += run.row_tokens
            work[NUMBERS["states read"]] += run.batch * kind.delta.state_bytes(torch.bfloat16)
            continue
        seen = min(run.seen + run.row_tokens / 2, kind.window or float("inf"))
        work[NUMBERS["KV read"]] += run.batch * min(run.seen, seen) * kv.token_bytes
        if run.tokens > RIDGE * run.batch:
            work[NUMBERS["operations of attention"]] += 4 * config.num_heads * config.head_dim * run.tokens * seen
    num_logits = run.tokens if run.num_logits is None else run.num_logits
    _product(work, config.vocab_size * config.hidden_size, num_logits, head_form(form))
    return work


def head_part(config: DecoderConfig, ranks: int = 1) -> tuple[float, DecoderConfig]:
    """Numbers of an EAGLE-3 head's layer on a rank of this part of a model, and the layer as a config."""
    hidden = config.hidden_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    numbers = 2 * hidden * (query + 2 * kv) + hidden * query + 3 * hidden * config.intermediate_size
    layer = replace(config.layers[-1], delta=None, feed_forward=None, window=None)
    vocab = ceil_div(min(DRAFT_VOCAB, config.vocab_size * ranks), ranks)
    return numbers, replace(config, layers=(layer,), vocab_size=vocab, feeds=())


def round_of(config: DecoderConfig, form: str, batch: int, seen: float, num_steps: int, ranks: int = 1) -> Work:
    """The work of a round with so many drafts in a chain: its passes, then the target's."""
    work = work_of(config, form, Pass(batch=batch, row_tokens=num_steps + 1, seen=seen))
    numbers, head = head_part(config, ranks)
    for step in range(num_steps):
        tokens = batch * (num_steps + 1) if step == 0 else batch  # first what the target has accepted
        work[NUMBERS["passes of a draft head"]] += 1
        _product(work, numbers + (3 * config.hidden_size**2 / ranks if step == 0 else 0), tokens, form)
        _product(work, head.vocab_size * config.hidden_size, batch, head_form(form))
        work[NUMBERS["KV read"]] += batch * seen * kv_shapes(head, torch.bfloat16)[0].token_bytes
    return work


def prefill_of(config: DecoderConfig, form: str, length: int) -> Work:
    """The work of one prompt, in chunks."""
    starts = range(0, length, CHUNK)
    chunks = [Pass(batch=1, row_tokens=min(CHUNK, length - at), seen=at, num_logits=1) for at in starts]
    return sum((work_of(config, form, chunk) for chunk in chunks), _none())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A step that was measured, or a prompt."""

    shape: str
    form: str
    what: str
    seconds: float
    work: Work
    tokens: float = 1.0  # that it gave to each request

    @property
    def ms(self) -> float:
        """Milliseconds a token."""
        return 1e3 * self.seconds / self.tokens


def measured_rows() -> list[Row]:
    """All that the costs are fitted to."""
    rows = [row for table in TABLES for row in rows_of(RESULTS / f"gpu_table_h200_{table}.json")]
    for batch, (plain, drafted) in SMALL.items():
        rows.append(_step("135m", "bf16", batch, plain, 0.0))
        rows.append(_step("135m", "bf16", batch, drafted, 2.5))
    for name, length, rate in PREFILLS:
        work = prefill_of(SHAPES[name], "bf16", length)
        what = f"prefill of {length:,}"
        rows.append(Row(shape=name, form="bf16", what=what, seconds=length / rate, work=work, tokens=length))
    name, length, ms = LONG_CONTEXT
    work = work_of(SHAPES[name], "bf16", Pass(batch=1, row_tokens=1, seen=length))
    rows.append(Row(shape=name, form="bf16", what=f"batch 1 behind {length:,}", seconds=ms / 1e3, work=work))
    return rows


def rows_of(table: Path) -> Iterator[Row]:
    """What a run of `bench.gpu_table` measured: overlapped steps of captured graphs, on pages of 64."""
    found = json.loads(table.read_text())
    for cell in found["cells"]:
        if cell.get("depth") == 1 and cell["graphs"] and cell["page_size"] == 64:
            yield _step(cell["shape"], found["weights"], cell["batch"], cell["ms_per_token"], cell["accept_length"])


def _step(name: str, form: str, batch: int, ms: float, accept_length: float) -> Row:
    config, what = {**SHAPES, **PARTS}[name], f"batch {batch}"
    if not accept_length:
        work = work_of(config, form, Pass(batch=batch, row_tokens=1, seen=MEASURED_LEN))
        return Row(shape=name, form=form, what=what, seconds=ms / 1e3, work=work)
    work = round_of(config, form, batch, MEASURED_LEN, 3)
    seconds = ms / 1e3 * accept_length
    return Row(shape=name, form=form, what=f"{what}, drafts", seconds=seconds, work=work, tokens=accept_length)


def fit(rows: Sequence[Row]) -> Work:
    """Costs of each kind of work, none below zero, that give the rows' times with the least relative errors."""
    scaled = np.array([row.work / row.seconds for row in rows])
    used = list(np.flatnonzero(scaled.any(axis=0)))
    costs = _none()
    while used:
        size = np.abs(scaled[:, used]).max(axis=0)
        found = np.linalg.lstsq(scaled[:, used] / size, np.ones(len(rows)), rcond=None)[0] / size
        if found.min() >= 0:
            costs[used] = found
            return costs
        used.pop(int(np.argmin(found * size)))
    return costs


def left_out(rows: Sequence[Row]) -> list[float | None]:
    """Each row's seconds by costs fitted without its shape; None: no other shape has such work."""
    said: list[float | None] = []
    for row in rows:
        others = [other for other in rows if (other.shape, other.form) != (row.shape, row.form)]
        known = np.any([other.work for other in others], axis=0)
        said.append(None if (row.work[~known] > 0).any() else float(fit(others) @ row.work))
    return said


def shown(number: int, cost: float) -> str:
    """A cost in its unit."""
    unit = KINDS[number][1]
    if not cost:
        return "nothing found"
    return f"{cost * 1e6:.2f} µs each" if unit == "us" else f"{1e-12 / cost:.2f} {unit}"
