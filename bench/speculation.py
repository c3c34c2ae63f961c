"""Speculation on this machine: `make bench-spec`, or `python -m bench.speculation --prompts FILE --draft FOLDER`.

In one run, side by side: plain decoding, n-gram chains, chains and a tree of an EAGLE-3 head, at depth 0 and 1, on
pages of 1 and 64 tokens, 1, 4 and 8 requests at once. Accept length, histogram, tokens a second against plain, slots
held against slots used. What a round of T nodes costs against a plain step; and a task whose answer repeats its prompt.
Without --draft the head is untrained: its cost counts, its acceptance does not.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.heads import untrained_head
from roost.cli.prompts import PROMPTS, read_turns
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.messages import Event, Finished, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.step import StepPlan, StepResult, Ticket
from roost.text.language import Language
from roost.weights.draft import head_kind, load_head
from roost.weights.load import load_decoder, open_source
from roost.weights.pull import find_model

Item = TypeVar("Item")

CASES: dict[str, SpecConfig] = {
    "plain": SpecConfig(),
    "ngram": SpecConfig(spec="ngram", spec_steps=4),
    "chain": SpecConfig(spec="eagle3", draft="-", spec_steps=3, spec_lookup="off"),
    "tree": SpecConfig(spec="eagle3", draft="-", spec_steps=4, spec_topk=4, spec_tokens=16, spec_lookup="off"),
}
DRAFT_TOKENS = 8192  # vocabulary of the untrained head
WIDTHS = (2, 3, 5, 9, 17, 33)  # T of rounds whose cost is measured
REPETITIVE = """Write this list again, with every line unchanged, and nothing else:
1. The red fox runs over the green hill in the morning.
2. The blue bird sings on the tall tree at noon.
3. The old cat sleeps under the warm stove in the evening.
4. The small mouse eats a piece of yellow cheese at night.
5. The white owl looks for the small mouse in the dark."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What is measured."""

    model: Decoder
    head: Head
    device: torch.device
    language: Language
    prompts: list[tuple[int, ...]]


class Watched:
    """An executor that remembers the last two plans: those that a tick may wait for."""

    def __init__(self, executor: TorchExecutor) -> None:
        self._executor = executor
        self.seen: deque[StepPlan] = deque(maxlen=2)

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step."""
        self.seen.append(plan)
        return self._executor.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step."""
        return self._executor.collect(ticket)


def read_prompts(path: Path | None, language: Language, count: int) -> list[tuple[int, ...]]:
    """Prompts as tokens: `turns` or `prompt` of each line of a file, or the project's own."""
    texts = list(PROMPTS) if path is None else [turns[0] for turns in read_turns(path)]
    return [language.chat_tokens([{"role": "user", "content": text}]) for text in spread(texts, count)]


def spread(items: Sequence[Item], count: int) -> Sequence[Item]:
    """So many, from all over."""
    return items[:: max(1, len(items) // count)][:count]


def run(parts: Parts, spec: SpecConfig, at_once: int, depth: int, page_size: int, new_tokens: int) -> dict[str, Any]:
    """All prompts, `at_once` at a time."""
    config = EngineConfig(
        memory=MemoryConfig(page_size=page_size, pool_tokens=16384),
        sched=SchedConfig(context=2048, max_running=at_once, overlap=depth == 1),
        spec=spec,
    )
    resolved = resolve(config, parts.model.traits)
    executor = TorchExecutor(parts.model, resolved, parts.device, parts.head if resolved.spec.pair else None)
    watched = Watched(executor)
    engine = Engine(resolved, watched, SystemClock())
    ends: list[Finished] = []
    outputs: list[list[int]] = [[] for _ in parts.prompts]
    num_tokens = 0

    def reply(event: Event) -> None:
        nonlocal num_tokens
        if isinstance(event, Tokens):
            num_tokens += len(event.tokens)
            outputs[int(event.request_id)].extend(event.tokens)
        elif isinstance(event, Finished):
            ends.append(event)

    for number, prompt in enumerate(parts.prompts):
        engine.post(Submit(request_id=str(number), tokens=prompt, max_new_tokens=new_tokens), reply)
    held, used, decode_s, num_rounds, num_decoded = 0, 0, 0.0, 0, 0
    while engine.has_work:
        before, began = num_tokens, time.perf_counter()
        engine.tick()
        wall_s = time.perf_counter() - began
        if any(plan.is_prefill.any() for plan in watched.seen) or num_tokens == before:
            continue  # steps that only decode are what is compared
        decode_s += wall_s
        num_rounds += 1
        num_decoded += num_tokens - before
        held += sum(len(each.lease.pages[0]) * page_size for each in engine.state.running)
        used += sum(each.lease.settled_len for each in engine.state.running)
    executor.close()
    stats = engine.state.spec_counters.snapshot()
    assert len(ends) == len(parts.prompts)
    return {
        "decode_s": decode_s,
        "rounds": num_rounds,
        "tokens": sum(each.usage.completion_tokens for each in ends),
        "accept_length": stats.accept_length or 1.0,
        "histogram": stats.histogram,
        "held_over_used": held / max(used, 1),
        "step_ms": 1000 * decode_s / max(num_rounds, 1),
        "tokens_s": num_decoded / decode_s,
        "outputs": outputs,
    }


def sweep(parts: Parts, new_tokens: int) -> list[dict[str, Any]]:
    """Every case against plain decoding under the same conditions."""
    rows = []
    for at_once in (1, 4, 8):
        for page_size in (1, 64):
            for depth in (0, 1):
                plain: dict[str, Any] = {}
                for name, spec in CASES.items():
                    result = run(parts, spec, at_once, depth, page_size, new_tokens)
                    plain = plain or result
                    same = sum(a == b for a, b in zip(result["outputs"], plain["outputs"], strict=True))
                    over = {"over_plain": result["tokens_s"] / plain["tokens_s"], "same_as_plain": same}
                    where = {"case": name, "at_once": at_once, "page_size": page_size, "depth": depth}
                    rows.append(where | {key: value for key, value in result.items() if key != "outputs"} | over)
                    print(_line(rows[-1]), flush=True)
    return rows


def round_costs(parts: Parts) -> list[dict[str, Any]]:
    """What a round of T nodes costs against a plain step: n-gram rounds, whose drafting is next to free."""
    rows = []
    for at_once in (1, 4):
        plain = run(parts, SpecConfig(), at_once, 0, 64, 24)["step_ms"]
        for width in WIDTHS:
            spec = SpecConfig(spec="ngram", spec_steps=width - 1)
            cost = run(parts, spec, at_once, 0, 64, 24)["step_ms"] / plain
            rows.append({"at_once": at_once, "width": width, "over_plain_step": cost})
            print(f"a round of {width:>2} nodes, {at_once} at once: {cost:.2f} plain steps", flush=True)
    return rows


def repetition(parts: Parts) -> list[dict[str, Any]]:
    """A task whose answer is in its prompt, where n-gram drafts are at their best."""
    tokens = parts.language.chat_tokens([{"role": "user", "content": REPETITIVE}])
    task = replace(parts, prompts=[tokens])
    plain, rows = 0.0, []
    for name in ("plain", "ngram"):
        result = run(task, CASES[name], 1, 1, 16, 96)
        plain = plain or result["tokens_s"]
        rows.append({"case": name, "over_plain": result["tokens_s"] / plain, "accept_length": result["accept_length"]})
        print(f"repetitive task, {name}: {rows[-1]['over_plain']:.2f} of plain", flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:<6} {row['at_once']} at once, page {row['page_size']:>2}, depth {row['depth']}: "
        f"{row['tokens_s']:7.1f} tok/s, {row['over_plain']:.2f} of plain, accept length {row['accept_length']:.2f} "
        f"{list(row['histogram'])}, held/used {row['held_over_used']:.2f}, {row['same_as_plain']} outputs as plain"
    )


def load(args: argparse.Namespace) -> Parts:
    """The default model, the head, the prompts."""
    device = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
    weights = "int8" if device.type == "cpu" else "bf16"
    source = open_source(find_model(args.model)[1])
    model = load_decoder(source, weights=weights, device=device)
    if args.draft is None:
        head = untrained_head("eagle3", model, weights, device, DRAFT_TOKENS)
    else:
        head = load_head(args.draft, head_kind(args.draft), model, layer_ids=None, weights=weights, device=device)
    language = source.language()
    prompts = read_prompts(args.prompts, language, args.requests)
    return Parts(model=model, head=head, device=device, language=language, prompts=prompts)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", type=Path, default=None, help="one JSON object with `turns` or `prompt` a line")
    parser.add_argument("--draft", type=Path, default=None, help="the folder of an EAGLE head; untrained if absent")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with ThreadPoolExecutor(max_workers=1) as loader:  # on a thread that ends, as at start-up
        parts = loader.submit(load, args).result()
    print(f"{parts.device}, {torch.get_num_threads()} threads; head: {args.draft or 'untrained'}", flush=True)
    report = {
        "repetition": repetition(parts),
        "cases": sweep(parts, args.new_tokens),
        "round_costs": round_costs(parts),
    }
    if args.json is not None:
        report |= {
            "device": str(parts.device),
            "threads": torch.get_num_threads(),
            "head": str(args.draft or "untrained"),
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
