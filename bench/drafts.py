"""What a draft head is worth: `python -m bench.drafts --draft FOLDER [--kinds …] [--prompts FILE…] [--json PATH]`.

Accept lengths of chains and trees by kind of text or on prompt files, all turns of each conversation, greedy and at a
temperature; how often each place of a chain is right; answers that go round in circles, and the accept length without
them; n-gram drafting beside it; at the end a table. One run, on a CPU or a GPU; accept lengths depend on neither.
Without --kinds and --prompts: all kinds of `bench.kinds`.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.kinds import ALL, add_arguments, texts
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.messages import Finished, SpecStats, Submit
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.runner.executor import TorchExecutor
from roost.sampling.params import SamplingParams
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of
from roost.text.language import Language
from roost.train.answers import TrainingAnswer, complete_all
from roost.weights.draft import load_head
from roost.weights.load import load_decoder, open_source
from roost.weights.pull import find_model

CONTEXT = 3072


def ways() -> dict[str, SpecConfig]:
    """Ways to draft; the folder of the head is loaded elsewhere. Texts of other requests are never looked up in."""
    alone = SpecConfig(spec="eagle3", draft="-", spec_lookup="off")
    chains = {f"chain S {steps}": replace(alone, spec_steps=steps) for steps in (2, 4, 6)}
    trees = {
        f"tree K {topk} S {steps} T {tokens}": replace(alone, spec_steps=steps, spec_topk=topk, spec_tokens=tokens)
        for topk, steps, tokens in ((4, 4, 16), (8, 5, 32))
    }
    heads = {**chains, **trees, "auto": alone}
    both = {f"{name} + lookup": replace(spec, spec_lookup="own") for name, spec in heads.items()}
    lookup = SpecConfig(spec="ngram", spec_lookup="own")
    return {**heads, **both, "n-gram S 4": replace(lookup, spec_steps=4), "n-gram auto": lookup}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is measured."""

    model: Decoder
    head: Head | None
    language: Language
    device: torch.device
    running: int  # requests at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer and how it was drafted."""

    answer: TrainingAnswer
    spec: SpecStats


def answer(
    parts: Parts, spec: SpecConfig, prompts: Sequence[tuple[int, ...]], temperature: float, num_new: int
) -> list[Said]:
    """All prompts answered by a new engine."""
    config = EngineConfig(
        memory=MemoryConfig(pool_tokens=parts.running * CONTEXT),
        sched=SchedConfig(context=CONTEXT, max_running=parts.running),
        spec=spec,
    )
    resolved = resolve(config, parts.model.traits, backend_of(config, parts.device))
    head = parts.head if resolved.spec.pair else None
    executor = TorchExecutor(parts.model, resolved, parts.device, head)
    engine = Engine(resolved, executor, SystemClock())
    stop_ids = parts.language.tokenizer.eos_ids
    submits = (
        Submit(
            request_id=str(number),
            tokens=prompt,
            max_new_tokens=num_new,
            sampling=SamplingParams(temperature=temperature, seed=number),
            stop_token_ids=stop_ids,
        )
        for number, prompt in enumerate(prompts)
    )
    said = {}
    for output, end in complete_all(engine, submits, at_once=max(1, len(prompts))):
        assert isinstance(end, Finished), end
        number = int(end.request_id)
        answered = TrainingAnswer(prompt=prompts[number], output=output, temperature=temperature)
        said[number] = Said(answer=answered, spec=end.spec)
    executor.close()
    return [said[number] for number in range(len(prompts))]


def conversations(
    parts: Parts, talks: Sequence[Sequence[str]], temperature: float, num_new: int
) -> list[tuple[int, ...]]:
    """Prompts of all turns of some conversations; answers between them are the model's own."""
    prompts = []
    messages: list[list[dict[str, Any]]] = [[] for _ in talks]
    for turn in range(max(len(talk) for talk in talks)):
        on = [number for number, talk in enumerate(talks) if turn < len(talk)]
        for number in on:
            messages[number].append({"role": "user", "content": talks[number][turn]})
        asked = [parts.language.chat_tokens(messages[number]) for number in on]
        fits = [len(each) + num_new <= CONTEXT for each in asked]
        prompts += [each for each, is_in in zip(asked, fits, strict=True) if is_in]
        if turn + 1 == max(len(talk) for talk in talks):
            break
        said = answer(parts, SpecConfig(), [each[: CONTEXT - num_new] for each in asked], temperature, num_new)
        for number, each in zip(on, said, strict=True):
            text = parts.language.tokenizer.decode(each.answer.output, skip_special=True)
            messages[number].append({"role": "assistant", "content": text})
    return prompts


def summary(said: Sequence[Said]) -> dict[str, Any]:
    """Accept length and what it is made of."""
    straight = [each for each in said if not each.answer.is_looping]
    rounds, histogram = sum(each.spec.rounds for each in said), _sum([each.spec.histogram for each in said])
    reached = [sum(histogram[place:]) for place in range(len(histogram))]  # rounds that accepted so many or more
    return {
        "answers": len(said),
        "tokens": sum(len(each.answer.output) for each in said),
        "accept_length": _accept_length(said),
        "looping": len(said) - len(straight),
        "accept_length_straight": _accept_length(straight),
        "rounds": rounds,
        "right_by_place": [after / before for before, after in itertools.pairwise(reached) if before],
    }


def _accept_length(said: Sequence[Said]) -> float:
    rounds = sum(each.spec.rounds for each in said)
    return 1 + sum(each.spec.drafts_accepted for each in said) / rounds if rounds else 0.0


def _sum(histograms: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*histograms, strict=True)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accept lengths: a line for each text and for their mean, a column for each way and temperature."""
    cells = {(row["prompts"], row["way"], row["temperature"]): float(row["accept_length"]) for row in rows}
    names, used, temperatures = (list(dict.fromkeys(column)) for column in zip(*cells, strict=True))
    widths = [max(7, math.ceil((len(way) + 2) / len(temperatures))) for way in used for _ in temperatures]
    lines = {name: [cells[name, way, at] for way in used for at in temperatures] for name in names}
    lines["mean"] = [statistics.fmean(column) for column in zip(*lines.values(), strict=True)]
    ways_line = _line_of(used, [width * len(temperatures) for width in widths[:: len(temperatures)]])
    temperatures_line = _line_of([f"T {at:g}" for at in temperatures] * len(used), widths)
    figures = [f"{name:14}" + _line_of([f"{each:.2f}" for each in line], widths) for name, line in lines.items()]
    return "\n".join([" " * 14 + ways_line, " " * 14 + temperatures_line, *figures])


def _line_of(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def row_line(row: dict[str, Any]) -> str:
    """One way on one text at one temperature."""
    places = " ".join(f"{share:.2f}" for share in row["right_by_place"])
    straight = f"{row['accept_length_straight']:.2f} without {row['looping']} looping of {row['answers']}"
    title = f"{row['prompts']:14} T {row['temperature']:3} {row['way']:18}"
    return f"{title} accept length {row['accept_length']:.2f}, {straight}; {places}"


def load(args: argparse.Namespace, weights: str, device: torch.device) -> Parts:
    """The model and the head."""
    source = open_source(find_model(args.model)[1])
    ops = ops_of(backend_of(EngineConfig(), device))
    model = load_decoder(source, weights=weights, device=device, ops=ops)
    head = load_head(args.draft, "eagle3", model, layer_ids=None, weights=weights, device=device)
    return Parts(model=model, head=head, language=source.language(), device=device, running=args.running)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", type=Path, required=True)
    add_arguments(parser)
    parser.add_argument("--limit", type=int, default=None, help="conversations of each file")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--running", type=int, default=16)
    parser.add_argument("--weights", choices=["int8", "fp32", "bf16"], default=None, help="as the device would have it")
    parser.add_argument("--ways", nargs="+", choices=list(ways()), default=[each for each in ways() if "S" in each])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = args.weights or ("bf16" if device.type == "cuda" else "int8")
    talks_by_text = texts(args.prompts, args.kinds or ([] if args.prompts else [ALL]))
    parts = load(args, weights, device)
    told = {"device": str(device), "weights": weights, "limit": args.limit, "new_tokens": args.new_tokens}
    rows = []
    for (name, talks), temperature in itertools.product(talks_by_text.items(), args.temperatures):
        prompts = conversations(parts, talks[: args.limit], temperature, args.new_tokens)
        for way in args.ways:
            said = answer(parts, ways()[way], prompts, temperature, args.new_tokens)
            rows.append({"prompts": name, "temperature": temperature, "way": way, **summary(said)})
            print(row_line(rows[-1]), flush=True)
            if args.json is not None:  # after each, since the next may be cut
                args.json.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n")
    print(f"\n{table(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
