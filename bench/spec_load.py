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
from collections.abc import Sequence
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


class Case:
    """An engine that drafts in one way; the same for every run at a load, so that it keeps what it learned."""

    def __init__(self, parts: Parts, spec: SpecConfig, groups: Sequence[Prompts], args: argparse.Namespace) -> None:
        began, self._groups, self._num_new = time.perf_counter(), groups, args.new_tokens
        context, at_once = max(len(each) for group in groups for each in group) + args.new_tokens, len(groups[0])
        config = EngineConfig(
            memory=MemoryConfig(pool_tokens=2 * at_once * (context + 64)),
            sched=SchedConfig(context=context, max_running=at_once, overlap=args.depth == 1),
            spec=spec,
        )
        resolved = resolve(config, parts.model.traits, backend_of(config, parts.device))
        self.executor = TorchExecutor(parts.model, resolved, parts.device, parts.head if resolved.spec.pair else None)
        self._engine = Engine(resolved, self.executor, SystemClock())
        self.start_s = time.perf_counter() - began
        self._seen: deque[StepPlan] = deque(maxlen=2)  # those that a tick may wait for
        launch = self.executor.launch

        def launch_seen(plan: StepPlan) -> Ticket:
            self._seen.append(plan)
            return launch(plan)

        self.executor.launch = launch_seen  # type: ignore[method-assign]

    def run(self) -> float:
        """Tokens a second of steps that only decode, with all prompts of a group at once."""
        decode_s, num_decoded, num_tokens, engine = 0.0, 0, 0, self._engine

        def reply(event: Event) -> None:
            nonlocal num_tokens
            num_tokens += len(event.tokens) if isinstance(event, Tokens) else 0

        for group in self._groups:
            for number, prompt in enumerate(group):
                engine.post(Submit(request_id=str(number), tokens=prompt, max_new_tokens=self._num_new), reply)
            while engine.has_work:
                before, began = num_tokens, time.perf_counter()
                engine.tick()
                if not any(plan.is_prefill.any() for plan in self._seen) and len(engine.state.running) == len(group):
                    decode_s += time.perf_counter() - began
                    num_decoded += num_tokens - before
        return num_decoded / decode_s

    def drafts(self) -> dict[str, Any]:
        """What was drafted in all runs."""
        lengths = self._engine.state.totals.draft_lengths
        return {
            "accept_length": self._engine.state.counters.snapshot().accept_length or 1.0,
            "draft_length": sum(number * count for number, count in lengths.items()) / max(1, sum(lengths.values())),
            "draft_lengths": lengths,
        }


def compare(parts: Parts, text: str, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """Every case at one load, in turns."""
    own, number = parts.prompts[text], max(concurrency, args.requests if text == "questions" else 1)
    prompts = [own[at % len(own)] for at in range(number - number % concurrency)]
    groups = [prompts[first : first + concurrency] for first in range(0, len(prompts), concurrency)]
    cases = {name: Case(parts, spec, groups, args) for name, spec in parts.cases.items()}
    runs: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.repeats):
        for name, case in cases.items():
            runs[name].append(case.run())
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        over = [each / plain for each, plain in zip(runs[name], runs["plain"], strict=True)]
        rate = {"tokens_s": statistics.median(runs[name]), "over_plain": statistics.median(over)}
        found[name] = {**rate, "over_plain_each": over, "start_s": case.start_s, **case.drafts()}
        case.executor.close()
    shares = "".join(f"{found[name]['over_plain']:9.2f}" for name in list(cases)[1:])
    print(f"{text:<11}{concurrency:>5}{found['plain']['tokens_s']:>9.1f}{shares}{_of_auto(found['auto'])}", flush=True)
    return {"text": text, "concurrency": concurrency, "cases": found}


def _of_auto(case: dict[str, Any]) -> str:
    return f"{case['draft_length']:>9.2f}{case['accept_length']:>9.2f}{case['start_s']:>9.1f}"


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
    print(f"{'text':<11}{'rows':>5}{'plain/s':>9}{names}   of auto: drafts, accepted, start", flush=True)
    rows = [compare(parts, text, number, args) for text in args.texts for number in args.concurrency]
    if args.json is not None:
        told = {"device": str(parts.device), "threads": torch.get_num_threads(), "draft": str(args.draft or "n-gram")}
        args.json.write_text(json.dumps({**told, "depth": args.depth, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
