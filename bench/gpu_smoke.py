"""The same runner on a CUDA GPU: right first, then how fast. `python -m bench.gpu_smoke [--model FILE] [--out FOLDER]`

Tiny random models (full, all-window, mixed layers, those of `bench.gpu_shapes`) and, given its file, the default model:
greedy output at depth 0 and 1, plain and speculating (n-gram, chains and trees of heads, several page sizes), must
equal the CPU's plain one, or part from it only where the CPU itself saw the two tokens within a stated gap. Then tokens
a second, depth 0 beside depth 1. Without a GPU it compares the CPU with itself, as a rehearsal.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_shapes import SHAPES, RandomState
from bench.heads import TargetHead, untrained_head
from roost.attention.registry import TORCH, Backend
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.layers.rotary import Rope
from roost.messages import Event, Finished, SpecStats, Submit, TokenLogprob, Tokens
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.model import Head
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of
from roost.weights.load import load_decoder, open_source
from roost.weights.source import Source

CPU = torch.device("cpu")
GPU = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
KERNELS = backend_of(EngineConfig(), GPU)  # the backend that the device would choose
GAP_MAX = {"fp32": 1e-3, "bf16": 0.5}  # log-probabilities that rounding may swap
ERROR_RATIO_MAX = 1.5  # kernels' over torch's, which round too
ERROR_FLOOR = 1e-4  # beside it
NUM_BEST = 5  # tokens of the reference among which another may be
WINDOW = 24
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None,) * 3,
    "window": (WINDOW,) * 3,
    "mixed": (WINDOW, None, WINDOW),
}
TINY = [*WINDOWS, *(name for name in SHAPES if name.startswith("tiny-"))]
Pair = tuple[Decoder, Decoder]  # a model with the device's own operations, and with torch's
PROMPTS = (
    "What is the capital of France?",
    "The three primary colours are",
    "def is_palindrome(word):",
    "Once upon a time, in a village by the sea,",
    "Water boils at 100 degrees Celsius because",
    "List the planets of the solar system in order:",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Tokens of one request, and what the model thought of them."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


def tiny(windows: tuple[int | None, ...]) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """A random model with such layers."""
    rope = Rope(theta=10000.0)
    config = DecoderConfig(
        vocab_size=211,
        hidden_size=96,
        intermediate_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        context_max=1024,
        layers=tuple(LayerKind(rope=rope, window=window) for window in windows),
        scale=16**-0.5,
        norm_eps=1e-5,
        tied=True,
    )
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.25

    state = {"model.embed_tokens.weight": random(211, 96) * 4, "model.norm.weight": torch.ones(96)}
    for number in range(len(windows)):
        layer = f"model.layers.{number}."
        shapes = {"q": (96, 96), "k": (32, 96), "v": (32, 96), "o": (96, 96)}
        state |= {f"{layer}self_attn.{name}_proj.weight": random(*shape) for name, shape in shapes.items()}
        feeds = {"gate": (160, 96), "up": (160, 96), "down": (96, 160)}
        state |= {f"{layer}mlp.{name}_proj.weight": random(*shape) for name, shape in feeds.items()}
        state |= {f"{layer}{name}.weight": torch.ones(96) for name in ("input_layernorm", "post_attention_layernorm")}
    return config, state


def drawn(name: str) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """A random model of one of the benchmarks' shapes."""
    return SHAPES[name], {tensor: value.float().cpu() for tensor, value in RandomState(SHAPES[name]).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a model is run: plainly, or with drafts of some head."""

    name: str = "plain"
    depth: int
    backend: Backend = TORCH
    graphs: bool = True
    page_size: int = 16
    spec: SpecConfig = SpecConfig()
    head: Head | None = None
    beside: bool = False  # prompts come one after the other, in chunks beside rounds; nobody asks for logprobs


def engine(model: Decoder, device: torch.device, case: Case, max_running: int = 64) -> tuple[Engine, TorchExecutor]:
    """An engine over a model, with the strictest audit while few run."""
    strict = 2 if max_running <= 8 else 0
    config = EngineConfig(
        memory=MemoryConfig(page_size=case.page_size, pool_tokens=64 * 1024, strict_memory=strict),
        sched=SchedConfig(
            context=1024,
            max_running=max_running,
            chunk=24 if case.beside else 512,
            overlap=case.depth == 1,
            graphs=None if case.graphs else False,
        ),
        spec=case.spec,
    )
    resolved = resolve(config, model.traits, case.backend)
    executor = TorchExecutor(model, resolved, device, case.head)
    return Engine(resolved, executor, SystemClock()), executor


def drafting(model: Decoder, device: torch.device, weights: str, *, sure: bool) -> list[Case]:
    """Ways to speculate; `sure` adds the target as its own drafter, which accepts nearly everything."""
    eagle, eagle3 = (untrained_head(kind, model, weights, device, num_tokens=200) for kind in ("eagle", "eagle3"))
    chain = SpecConfig(spec="eagle", draft="-", spec_steps=3)
    tree = SpecConfig(spec="eagle3", draft="-", spec_steps=4, spec_topk=4, spec_tokens=16)
    wide = SpecConfig(spec="eagle3", draft="-", spec_steps=5, spec_topk=8, spec_tokens=32)
    ways: list[tuple[str, SpecConfig, Head | None]] = [
        ("ngram", SpecConfig(spec="ngram"), None),
        ("eagle chain", chain, eagle),
        ("eagle3 tree", tree, eagle3),
    ]
    if sure:
        own = TargetHead(model)
        auto, alone = SpecConfig(spec="eagle", draft="-"), replace(chain, spec_lookup="off")
        ways += [("own chain", chain, own), ("own tree", tree, own), ("own wide tree", wide, own)]
        ways += [("own auto", auto, own), ("own chain, nothing looked up", alone, own)]
    pages = (1, 16, 64) if sure else (64,)
    return [
        Case(name=name, depth=depth, page_size=page_size, spec=spec, head=head, backend=KERNELS, graphs=graphs)
        for name, spec, head in ways
        for page_size in pages
        for depth in (0, 1)
        for graphs in ((True, False) if page_size == pages[-1] and KERNELS is not TORCH else (True,))
    ]


def answers(
    model: Decoder, device: torch.device, case: Case, prompts: list[tuple[int, ...]], num_new: int
) -> tuple[list[Answer], SpecStats]:
    """Greedy answers to all prompts at once, and what speculation did."""
    runs, executor = engine(model, device, case, max_running=8)
    events: list[Event] = []
    for number, prompt in enumerate(prompts):
        num_top = None if case.beside else NUM_BEST
        submit = Submit(request_id=str(number), tokens=prompt, max_new_tokens=num_new, num_top_logprobs=num_top)
        runs.post(submit, events.append)
        for _ in range(3 if case.beside else 0):
            runs.tick()
    while runs.has_work:
        runs.tick()
    assert runs.state.totals.failed_steps == 0, "a step broke, and was tried again"
    executor.close()
    found = []
    for number in range(len(prompts)):
        mine = [event for event in events if isinstance(event, Tokens) and event.request_id == str(number)]
        (end,) = [event for event in events if isinstance(event, Finished) and event.request_id == str(number)]
        assert end.reason == "length", end
        tokens = tuple(token for event in mine for token in event.tokens)
        found.append(Answer(tokens=tokens, logprobs=tuple(entry for event in mine for entry in event.logprobs)))
    return found, runs.state.spec_counters.snapshot()


def compare(name: str, mine: list[Answer], reference: list[Answer], gap_max: float) -> dict[str, Any]:
    """How many answers are the same; where one parts, the gap between the reference's two best tokens there.

    The error is that of log-probabilities of the best tokens, on average, as long as the text is the same.
    """
    gaps, errors = [], []
    for got, wanted in zip(mine, reference, strict=True):
        errors += _errors(got, wanted) if got.logprobs else []
        if got.tokens == wanted.tokens:
            continue
        at = next(i for i, (a, b) in enumerate(zip(got.tokens, wanted.tokens, strict=True)) if a != b)
        logprobs = dict(wanted.logprobs[at].top_logprobs)
        assert got.tokens[at] in logprobs, f"{name}: parted at {at} with a token that was not among the best {NUM_BEST}"
        gaps.append(logprobs[wanted.tokens[at]] - logprobs[got.tokens[at]])
    assert max(gaps, default=0.0) <= gap_max, f"{name}: parted at a gap of {max(gaps):.4g}, more than {gap_max}"
    counts = {"same": len(mine) - len(gaps), "of": len(mine)}
    error = statistics.mean(errors) if errors else 0.0
    return {"case": name, **counts, "largest_gap": max(gaps, default=0.0), "mean_error": error}


def _errors(got: Answer, wanted: Answer) -> list[float]:
    """How far the log-probabilities of the best tokens are off, up to where the text parts."""
    errors = []
    for number, (mine, right) in enumerate(zip(got.logprobs, wanted.logprobs, strict=True)):
        theirs = dict(right.top_logprobs)
        errors += [abs(logprob - theirs[token]) for token, logprob in mine.top_logprobs if token in theirs]
        if got.tokens[number] != wanted.tokens[number]:
            break
    return errors


def check(
    name: str, models: Mapping[str, Pair], reference: Decoder, prompts: list[tuple[int, ...]], *, sure: bool = False
) -> list[dict[str, Any]]:
    """Every model on the GPU, at both depths, against one on the CPU."""
    wanted, _ = answers(reference, CPU, Case(depth=1), prompts, 48)
    rows = []
    for weights, (model, with_torch) in models.items():
        plain = [Case(depth=depth, backend=KERNELS, graphs=graphs) for depth in (0, 1) for graphs in (True, False)]
        cases = [Case(name="torch", depth=1), *plain, *drafting(model, GPU, weights, sure=sure)]
        cases += [replace(case, beside=True) for case in cases[1:] if case.graphs and case.depth == 1]
        for case in cases:
            got, spec = answers(with_torch if case.backend is TORCH else model, GPU, case, prompts, 48)
            how = ("graphs" if case.graphs else "no graphs") + (" beside" if case.beside else "")
            title = f"{name} {weights} {case.name} page {case.page_size} depth {case.depth} {case.backend.name} {how}"
            found = compare(title, got, wanted, GAP_MAX[weights]) | {"accept_length": spec.accept_length}
            print(found, flush=True)
            if case.name == "torch":
                error_max = ERROR_RATIO_MAX * found["mean_error"] + ERROR_FLOOR
            assert found["mean_error"] <= error_max, "the kernels' error is larger than rounding makes it"
            rows.append(found)
    return rows


def _both(source: Source, weights: str) -> Pair:
    """The default model on the GPU, with both kinds of operations."""
    kinds = (ops_of(KERNELS), ops_of(TORCH))
    model, with_torch = (load_decoder(source, weights=weights, device=GPU, ops=ops) for ops in kinds)
    return model, with_torch


def check_no_waits(model: Decoder, prompts: list[tuple[int, ...]]) -> None:
    """Rounds, plain and speculating, and chunks beside them wait for nothing of the device but the collected result."""
    if GPU.type != "cuda":
        return
    chain = SpecConfig(spec="eagle", draft="-", spec_steps=3)
    head = untrained_head("eagle", model, "fp32", GPU, num_tokens=200)
    tree = SpecConfig(spec="eagle", draft="-", spec_steps=3, spec_topk=2, spec_tokens=6)
    plain = Case(depth=1, backend=KERNELS, beside=True)
    for case in (plain, replace(plain, spec=chain, head=head), replace(plain, spec=tree, head=head)):
        runs, executor = engine(model, GPU, case, max_running=8)
        for number, prompt in enumerate(prompts):
            runs.post(Submit(request_id=str(number), tokens=prompt[:20], max_new_tokens=64), lambda event: None)
        for _ in range(12):  # prompts are through by then
            runs.tick()
        torch.cuda.set_sync_debug_mode("error")  # raises at every waiting call but an event's
        try:
            for _ in range(3):
                runs.tick()
            longest = max(prompts, key=len)
            runs.post(Submit(request_id="beside", tokens=longest, max_new_tokens=8), lambda event: None)
            had_chunks = False
            for _ in range(6):
                runs.tick()
                had_chunks |= runs.state.prefilled_last  # not every step has one where rounds fill the budget
            assert had_chunks, "chunks were to run beside the rounds"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while runs.has_work:
            runs.tick()
        assert runs.state.totals.failed_steps == 0, "a step made a call that waits for the device"
        executor.close()
    print("no waiting call in rounds, nor in chunks beside them", flush=True)


def speed(name: str, model: Decoder, vocab_size: int, batch: int, depth: int) -> dict[str, object]:
    """Decode rate of `batch` requests of 64 + 128 tokens, prefill included in none of it."""
    runs, executor = engine(model, GPU, Case(depth=depth, backend=KERNELS))
    generator = torch.Generator().manual_seed(1)
    times: list[float] = []
    for number in range(batch):
        prompt = tuple(torch.randint(vocab_size, (64,), generator=generator).tolist())
        runs.post(Submit(request_id=str(number), tokens=prompt, max_new_tokens=128), lambda event: None)
    while runs.has_work:
        began = time.perf_counter()
        runs.tick()
        times.append(time.perf_counter() - began)
    executor.close()
    steady = sorted(times[len(times) // 3 : -len(times) // 6])
    tick_s = steady[len(steady) // 2]
    return {"case": name, "batch": batch, "depth": depth, "ms_per_step": tick_s * 1e3, "tokens_s": batch / tick_s}


def main() -> int:
    """Check, measure, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument(
        "--tiny", nargs="*", choices=TINY, default=TINY, help="models; after none the default one alone"
    )
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    device_name = torch.cuda.get_device_name() if GPU.type == "cuda" else "CPU (rehearsal)"
    print(f"{device_name}, torch {torch.__version__}", flush=True)
    generator = torch.Generator().manual_seed(2)
    random_prompts = [
        tuple(torch.randint(211, (length,), generator=generator).tolist()) for length in (1, 7, 40, 90, 150, 33)
    ]
    checks, speeds = [], []
    for name in args.tiny:
        config, state = tiny(WINDOWS[name]) if name in WINDOWS else drawn(name)
        model, with_torch = (Decoder(config, state, "fp32", GPU, ops_of(backend)) for backend in (KERNELS, TORCH))
        reference = Decoder(config, state, "fp32", CPU)
        checks += check(name, {"fp32": (model, with_torch)}, reference, random_prompts, sure=name in WINDOWS)
        check_no_waits(model, random_prompts)
    if args.model is not None:
        source = open_source(args.model)
        language = source.language()
        prompts = [language.chat_tokens([{"role": "user", "content": text}]) for text in PROMPTS[:3]]
        prompts += [language.prompt_tokens(text) for text in PROMPTS[3:]]
        reference = load_decoder(source, weights="fp32", device=CPU)
        on_gpu = {weights: _both(source, weights) for weights in ("fp32", "bf16")}
        checks += check("default", on_gpu, reference, prompts)
        for weights, (model, _) in on_gpu.items():
            for batch in (1, 8, 64):
                for depth in (0, 1):
                    speeds.append(speed(f"default {weights}", model, 40_000, batch, depth))
                    print(speeds[-1], flush=True)
    if args.out is not None:
        report = {"device": device_name, "torch": torch.__version__, "checks": checks, "speeds": speeds}
        (args.out / "gpu_smoke.json").write_text(json.dumps(report, indent=1) + "\n")
    print("all equal, or parted within the gap")
    return 0


if __name__ == "__main__":
    sys.exit(main())
