"""Speculation under load: `python -m bench.spec_load --draft FOLDER --kinds all --json PATH`, side by side.

Plain decoding, drafts of a fixed length and of a length chosen by cost: n-gram lookup, the head in --draft, and both
(`auto`), with 1 to many requests at once: all turns of conversations of each file or kind, to the end of each answer;
without either the project's own questions, and a task whose answer repeats its prompt. Tokens a second of steps that
only decode, with as many requests as there may be, and of everything, prefill included, against plain's under the same
conditions. Cases take turns, so that a busy machine is busy for all.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.drafts import Parts as Talker
from bench.drafts import conversations
from bench.kinds import add_arguments, texts
from bench.speculation import REPETITIVE, read_prompts, spread
from roost.clock import SystemClock
from roost.config.options import AUTO, EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.messages import Event, Finished, Submit, Tokens
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.runner.executor import TorchExecutor
from roost.sampling.params import SamplingParams
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of
from roost.step import StepPlan, Ticket
from roost.weights.draft import head_kind, load_head
from roost.weights.load import load_decoder, open_source
from roost.weights.pull import find_model

Prompts = list[tuple[int, ...]]
DECODING, WHOLE = "tokens_s", "whole_tokens_s"  # rates: of steps that only decode; of everything


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What is measured."""

    model: Decoder
    head: Head | None
    device: torch.device
    prompts: dict[str, Prompts]  # by text
    stop_ids: frozenset[int]
    cases: dict[str, SpecConfig]


class Case:
    """An engine that drafts in one way, at one load; it keeps what it learned from run to run."""

    def __init__(
        self, parts: Parts, spec: SpecConfig, prompts: Prompts, at_once: int, args: argparse.Namespace
    ) -> None:
        self._parts, self._spec, self._prompts, self._at_once, self._args = parts, spec, prompts, at_once, args
        self._engine: Engine | None = None
        self._seen: deque[StepPlan] = deque(maxlen=2 + args.depth)  # launched in a tick, on their way, and waited for
        self.start_s = 0.0

    def open(self) -> None:
        """Make its engine."""
        began, parts, args = time.perf_counter(), self._parts, self._args
        context, at_once = max(map(len, self._prompts)) + args.new_tokens, self._at_once
        config = EngineConfig(
            memory=MemoryConfig(pool_tokens=2 * at_once * (context + 64)),
            sched=SchedConfig(context=context, max_running=at_once, overlap=args.depth == 1),
            spec=self._spec,
        )
        resolved = resolve(config, parts.model.traits, backend_of(config, parts.device))
        self._executor = TorchExecutor(parts.model, resolved, parts.device, parts.head if resolved.spec.pair else None)
        learned = None if self._engine is None else self._engine.state.draft_policy
        self._engine = Engine(resolved, self._executor, SystemClock())
        if learned is not None:
            self._engine.state.draft_policy = learned
        self.start_s = time.perf_counter() - began
        launch = self._executor.launch

        def launch_seen(plan: StepPlan) -> Ticket:
            self._seen.append(plan)
            return launch(plan)

        self._executor.launch = launch_seen  # type: ignore[method-assign]

    def close(self) -> None:
        """End its threads."""
        self._executor.close()

    def run(self) -> dict[str, float]:
        """Tokens a second; of steps that only decode as many requests as there may be at once, where there are some."""
        assert self._engine is not None
        decode_s, num_decoded, num_tokens, num_ended, engine = 0.0, 0, 0, 0, self._engine
        run_began = time.perf_counter()

        def reply(event: Event) -> None:
            nonlocal num_tokens, num_ended
            num_tokens += len(event.tokens) if isinstance(event, Tokens) else 0
            num_ended += isinstance(event, Finished)

        submits = [self._submit(number) for number in range(len(self._prompts))]
        for begun in range(len(submits) + 1):
            while engine.has_work and (begun == len(submits) or begun - num_ended == self._at_once):
                before, began = num_tokens, time.perf_counter()
                is_full = len(engine.state.running) == self._at_once
                engine.tick()
                if is_full and not any(plan.is_prefill.any() for plan in self._seen):
                    decode_s += time.perf_counter() - began
                    num_decoded += num_tokens - before
            if begun < len(submits):
                engine.post(submits[begun], reply)
        whole = {WHOLE: num_tokens / (time.perf_counter() - run_began)}
        return {DECODING: num_decoded / decode_s, **whole} if decode_s else whole

    def _submit(self, number: int) -> Submit:
        return Submit(
            request_id=str(number),
            tokens=self._prompts[number],
            max_new_tokens=self._args.new_tokens,
            sampling=SamplingParams(temperature=self._args.temperature, seed=number),
            stop_token_ids=self._parts.stop_ids,
        )

    def drafts(self) -> dict[str, Any]:
        """What its last engine drafted."""
        assert self._engine is not None
        lengths = self._engine.state.totals.draft_lengths
        return {
            "accept_length": self._engine.state.spec_counters.snapshot().accept_length or 1.0,
            "draft_length": sum(number * count for number, count in lengths.items()) / max(1, sum(lengths.values())),
            "draft_lengths": lengths,
        }


def compare(parts: Parts, text: str, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """Every case at one load, in turns."""
    own = parts.prompts[text]
    prompts = [own[at % len(own)] for at in range(max(2 * concurrency, len(own)))]
    cases = {name: Case(parts, spec, prompts, concurrency, args) for name, spec in parts.cases.items()}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    stay = parts.device.type == "cuda"  # to make one takes seconds there; on a CPU the threads of one slow another's
    with ExitStack() as all_open:
        for case in cases.values() if stay else ():
            all_open.enter_context(_opened(case))
        for _ in range(args.repeats):
            for name, case in cases.items():
                with nullcontext() if stay else _opened(case):
                    runs[name].append(case.run())
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        found[name] = {"start_s": case.start_s, **case.drafts()}
        for what, over_plain in ((DECODING, "over_plain"), (WHOLE, "whole_over_plain")):
            if any(what not in each for each in (*runs[name], *runs["plain"])):
                continue
            over = [each[what] / plain[what] for each, plain in zip(runs[name], runs["plain"], strict=True)]
            found[name] |= {what: statistics.median(each[what] for each in runs[name])}
            found[name] |= {over_plain: statistics.median(over), f"{over_plain}_each": over}
    shares = "".join(_share(found[name]) for name in list(cases)[1:])
    plain = f"{found['plain'].get(DECODING, math.nan):>9.1f}{found['plain'][WHOLE]:>9.1f}"
    print(f"{text:<14}{concurrency:>5}{plain}{shares}{_of_auto(found['auto'])}", flush=True)
    return {"text": text, "concurrency": concurrency, "cases": found}


@contextmanager
def _opened(case: Case) -> Iterator[None]:
    case.open()
    try:
        yield
    finally:
        case.close()


def _share(case: dict[str, Any]) -> str:
    return f"{case.get('over_plain', math.nan):>7.2f} ({case['whole_over_plain']:>5.2f})"


def _of_auto(case: dict[str, Any]) -> str:
    return f"{case['draft_length']:>9.2f}{case['accept_length']:>9.2f}{case['start_s']:>9.1f}"


def load(args: argparse.Namespace) -> Parts:
    """The model, the head, the prompts, and the cases."""
    device = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
    weights, ops = (
        args.weights or ("int8" if device.type == "cpu" else "bf16"),
        ops_of(backend_of(EngineConfig(), device)),
    )
    source = open_source(find_model(args.model)[1])
    model = load_decoder(source, weights=weights, device=device, ops=ops)
    head, spec = None, SpecConfig(spec="ngram")
    if args.draft is not None:
        kind = head_kind(args.draft)
        head = load_head(args.draft, kind, model, layer_ids=None, weights=weights, device=device)
        spec = SpecConfig(spec=kind, draft=str(args.draft))
    language = source.language()
    repetition = language.chat_tokens([{"role": "user", "content": REPETITIVE}])
    talker = Talker(model=model, head=head, language=language, device=device, running=args.talks)
    prompts = {}
    for text, talks in texts(args.prompts, args.kinds).items():
        prompts[text] = conversations(talker, spread(talks, args.talks), args.temperature, args.new_tokens)
    if not prompts:
        prompts = {"questions": read_prompts(None, language, args.talks), "repetition": [repetition]}
    cases = {str(steps): replace(spec, spec_steps=steps) for steps in args.steps}
    if head is not None:
        cases |= {"head": replace(spec, spec_lookup="off"), "n-gram": SpecConfig(spec="ngram", spec_lookup="own")}
    cases[AUTO] = replace(spec, spec_lookup="own")
    return Parts(
        model=model,
        head=head,
        device=device,
        prompts=prompts,
        stop_ids=language.tokenizer.eos_ids,
        cases={"plain": SpecConfig(), **cases},
    )


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    add_arguments(parser)
    parser.add_argument("--draft", type=Path, default=None, help="the folder of an EAGLE head; n-gram if absent")
    parser.add_argument("--concurrency", type=_numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--steps", type=_numbers, default=[2, 4], help="fixed lengths beside auto; may be empty")
    parser.add_argument("--talks", type=int, default=16, help="different conversations of each file")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depth", type=int, choices=(0, 1), default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the model, on a CPU")
    parser.add_argument("--weights", choices=["int8", "fp32", "bf16", "gguf"], default=None, help="as the device would")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with ThreadPoolExecutor(max_workers=1) as loader:  # on a thread that ends, as at start-up
        parts = loader.submit(load, args).result()
    print(f"{parts.device}, {torch.get_num_threads()} threads; drafts: {args.draft or 'n-gram'}", flush=True)
    names = "".join(f"{name:>7} (whole)" for name in list(parts.cases)[1:])
    print(f"{'text':<14}{'rows':>5}{'plain/s':>9}{'whole/s':>9}{names}   of auto: drafts, accepted, start", flush=True)
    told = {"device": str(parts.device), "threads": torch.get_num_threads(), "draft": str(args.draft or "n-gram")}
    rows = []
    for text, number in itertools.product(parts.prompts, args.concurrency):
        rows.append(compare(parts, text, number, args))
        if args.json is not None:  # after each, since the next may be cut
            args.json.write_text(
                json.dumps({**told, "depth": args.depth, "temperature": args.temperature, "rows": rows}, indent=1)
                + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
