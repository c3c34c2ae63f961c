"""Speculation under load: `python -m bench.spec_load --concurrency 1,2,4,8,16,32,64 --json PATH`, side by side.

Plain decoding, drafts of a fixed length and of a length chosen by cost, with 1 to many requests at once, on questions
and on a task whose answer repeats its prompt. Tokens a second of steps that only decode, against plain's under the same
conditions. Cases take turns, so that a busy machine is busy for all. N-gram, or the head in --draft.
"""

import argparse
import json
import statistics
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.speculation import REPETITIVE, read_prompts
from roost.clock import SystemClock
from roost.config import AUTO, EngineConfig, MemoryConfig, SchedConfig, SpecConfig, resolve
from roost.exec.executor import TorchExecutor
from roost.messages import Event, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.sched.drafting import Drafting
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of
from roost.step import StepPlan, Ticket
from roost.weights.draft import head_kind, load_head
from roost.weights.load import load_model, open_source
from roost.weights.pull import find_model

TEXTS = ("questions", "repetition")
Prompts = list[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What is measured."""

    model: Decoder
    head: Head | None
    device: torch.device
    prompts: dict[str, Prompts]  # by text
    cases: dict[str, SpecConfig]


def run(parts: Parts, spec: SpecConfig, prompts: Prompts, args: argparse.Namespace, kept: list[Drafting]) -> Any:
    """All prompts at once, each to its end; what was learned about drafts before is taken up again."""
    context = max(map(len, prompts)) + args.new_tokens
    config = EngineConfig(
        memory=MemoryConfig(pool_tokens=len(prompts) * (context + 64)),
        sched=SchedConfig(context=context, max_running=len(prompts), overlap=args.depth == 1),
        spec=spec,
    )
    resolved = resolve(config, parts.model.traits, backend_of(config, parts.device))
    executor = TorchExecutor(parts.model, resolved, parts.device, parts.head if resolved.spec.pair else None)
    engine = Engine(resolved, executor, SystemClock())
    if kept:
        engine.state.drafting = kept[-1]
    seen: deque[StepPlan] = deque(maxlen=2)  # those that a tick may wait for
    launch, num_tokens = executor.launch, 0

    def launch_seen(plan: StepPlan) -> Ticket:
        seen.append(plan)
        return launch(plan)

    def reply(event: Event) -> None:
        nonlocal num_tokens
        num_tokens += len(event.tokens) if isinstance(event, Tokens) else 0

    executor.launch = launch_seen  # type: ignore[method-assign]
    for number, prompt in enumerate(prompts):
        engine.post(Submit(request_id=str(number), tokens=prompt, max_new_tokens=args.new_tokens), reply)
    decode_s, num_decoded = 0.0, 0
    while engine.has_work:
        before, began = num_tokens, time.perf_counter()
        engine.tick()
        if not any(plan.is_prefill.any() for plan in seen) and len(engine.state.running) == len(prompts):
            decode_s += time.perf_counter() - began
            num_decoded += num_tokens - before
    executor.close()
    kept.append(engine.state.drafting)
    lengths = engine.state.totals.draft_lengths
    return {
        "tokens_s": num_decoded / max(decode_s, 1e-9),
        "accept_length": engine.state.counters.snapshot().accept_length or 1.0,
        "draft_length": sum(number * count for number, count in lengths.items()) / max(1, sum(lengths.values())),
        "draft_lengths": lengths,
    }


def compare(parts: Parts, text: str, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """Every case at one load, in turns."""
    own = parts.prompts[text]
    prompts = [own[number % len(own)] for number in range(concurrency)]
    kept: dict[str, list[Drafting]] = {name: [] for name in parts.cases}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in parts.cases}
    for _ in range(args.repeats):
        for name, spec in parts.cases.items():
            runs[name].append(run(parts, spec, prompts, args, kept[name]))
    cases: dict[str, dict[str, Any]] = {}
    for name, found in runs.items():
        over = [each["tokens_s"] / plain["tokens_s"] for each, plain in zip(found, runs["plain"], strict=True)]
        cases[name] = found[-1] | {"over_plain": statistics.median(over), "over_plain_each": over}
    shares = "".join(f"{cases[name]['over_plain']:9.2f}" for name in list(cases)[1:])
    rate, drafts = cases["plain"]["tokens_s"], cases["auto"]["draft_length"]
    print(f"{text:<11}{concurrency:>5}{rate:>9.1f}{shares}{drafts:>9.2f}", flush=True)
    return {"text": text, "concurrency": concurrency, "cases": cases}


def load(args: argparse.Namespace) -> Parts:
    """The model, the head, the prompts, and the cases."""
    device = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
    weights, ops = "int8" if device.type == "cpu" else "bf16", ops_of(backend_of(EngineConfig(), device))
    source = open_source(find_model(args.model)[1])
    model = load_model(source, weights=weights, device=device, ops=ops)
    head, spec = None, SpecConfig(spec="ngram")
    if args.draft is not None:
        kind = head_kind(args.draft)
        head = load_head(args.draft, kind, model, layer_ids=None, weights=weights, device=device)
        spec = SpecConfig(spec=kind, draft=str(args.draft))
    language = source.language()
    repetition = language.chat_tokens([{"role": "user", "content": REPETITIVE}])
    prompts = {"questions": read_prompts(args.prompts, language, args.requests), "repetition": [repetition]}
    lengths: list[int | str] = [*args.steps, AUTO]
    cases = {str(steps): SpecConfig(spec=spec.spec, draft=spec.draft, spec_steps=steps) for steps in lengths}
    return Parts(model=model, head=head, device=device, prompts=prompts, cases={"plain": SpecConfig(), **cases})


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=Path, default=None, help="one JSON object with `turns` or `prompt` a line")
    parser.add_argument("--draft", type=Path, default=None, help="the folder of an EAGLE head; n-gram if absent")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=_numbers, default=[2, 4], help="fixed lengths beside auto")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--requests", type=int, default=16, help="different questions")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depth", type=int, choices=(0, 1), default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the model, on a CPU")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with ThreadPoolExecutor(max_workers=1) as loader:  # on a thread that ends, as at start-up
        parts = loader.submit(load, args).result()
    print(f"{parts.device}, {torch.get_num_threads()} threads; drafts: {args.draft or 'n-gram'}", flush=True)
    names = "".join(f"{name:>9}" for name in list(parts.cases)[1:])
    print(f"{'text':<11}{'rows':>5}{'plain/s':>9}{names}{'drafts':>9}   of plain; drafts a round of auto", flush=True)
    rows = [compare(parts, text, number, args) for text in args.texts for number in args.concurrency]
    if args.json is not None:
        told = {"device": str(parts.device), "threads": torch.get_num_threads(), "draft": str(args.draft or "n-gram")}
        args.json.write_text(json.dumps({**told, "depth": args.depth, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
