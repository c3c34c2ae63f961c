"""Structured output with the default model: `python -m bench.structured`. What a grammar costs, and what it brings.

Four parts: `steps`, the time of a step whose rows are constrained beside one whose rows are free, by turns in one
process, without drafts and with the head; `json`, records by a schema with forced tokens as drafts and without;
`compile`, how long schemas take to compile; `others`, how evenly a free stream goes on while hard ones are compiled. On
a CPU; `bench.grammar_steps` has masks by vocabulary, and the GPU.
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from bench.grammar_steps import GRAMMAR, WORDS
from roost import LLM, EngineConfig, Options, SpecConfig
from roost.config.options import MemoryConfig, ModelConfig, SchedConfig
from roost.errors import CapacityError, RequestError
from roost.grammar.forms import json_schema_grammar
from roost.grammar.rows import GrammarRows
from roost.tools.answer_form import compiled

PLACES = ("Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Accra", "Perth", "Sofia")
TEXT = "The parcel for {place} left on 2026-03-0{day} and weighs {day} kg. Write it down as JSON."
RECORD = {
    "type": "object",
    "properties": {
        "destination": {"type": "string", "maxLength": 24},
        "sent_on": {"type": "string", "format": "date"},
        "weight_in_kilograms": {"type": "number"},
        "is_fragile": {"type": "boolean"},
        "handling_instructions": {"enum": WORDS},
        "recipient": {
            "type": "object",
            "properties": {"full_name": {"type": "string", "maxLength": 24}, "has_signed": {"type": "boolean"}},
            "required": ["full_name", "has_signed"],
            "additionalProperties": False,
        },
    },
    "required": ["destination", "sent_on", "weight_in_kilograms", "is_fragile", "handling_instructions", "recipient"],
    "additionalProperties": False,
}
SPECS = {"plain": SpecConfig(spec="none"), "head, 4 drafts": SpecConfig(spec="eagle3", spec_steps=4, spec_lookup="off")}
NUM_HARD = 50


def opened(spec: SpecConfig, threads: int) -> LLM:
    """An engine for up to 64 rows."""
    return LLM(
        config=EngineConfig(
            model=ModelConfig(threads=threads),
            memory=MemoryConfig(pool_tokens=32768),
            sched=SchedConfig(context=1024, max_running=64),
            spec=spec,
        )
    )


_NUMBERS = count()


def prompts(number: int) -> list[str]:
    """Different ones each time, so that none is found in the prefix cache."""
    each = [next(_NUMBERS) for _ in range(number)]
    return [f"{i}. " + TEXT.format(place=PLACES[i % len(PLACES)], day=1 + i % 9) for i in each]


def step_costs(llm: LLM, name: str, batches: Sequence[int], rounds: int, num_new: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step, free and constrained by turns; no output ends before its last token."""
    free = Options(temperature=0, max_new_tokens=num_new, ignore_eos=True)
    bound = replace(free, ignore_eos=False, grammar=GRAMMAR)
    llm.generate_all(prompts(2), bound)  # the first one builds the tokenizer's tables
    for batch in batches:
        times: dict[str, list[float]] = {"free": [], "constrained": []}
        for _ in range(rounds):
            for kind, options in (("free", free), ("constrained", bound)):
                before, began = llm.stats().steps, time.perf_counter()
                llm.generate_all(prompts(batch), options)
                times[kind].append(1e3 * (time.perf_counter() - began) / (llm.stats().steps - before))
        ratio = median(b / a for a, b in zip(*times.values(), strict=True))
        medians = {f"{kind}_ms": median(each) for kind, each in times.items()}
        yield {"part": "steps", "case": name, "rows": batch, **medians, "ratio": ratio}


def json_rates(llm: LLM, name: str, batches: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Tokens a second of records by a schema, with forced tokens as drafts and without, by turns."""
    options = Options(temperature=0, max_new_tokens=200, grammar=json_schema_grammar(RECORD))
    for batch in batches:
        rates: dict[bool, list[float]] = {True: [], False: []}
        shares = []
        for _ in range(rounds):
            for has_forced in (True, False):
                before, began = llm.stats(), time.perf_counter()
                with _forced(has_forced):
                    llm.generate_all(prompts(batch), options)
                spent, after = time.perf_counter() - began, llm.stats()
                num_tokens = after.completion_tokens - before.completion_tokens
                rates[has_forced].append(num_tokens / spent)
                if has_forced:
                    shares.append((after.spec.drafts_forced - before.spec.drafts_forced) / num_tokens)
        gain = median(a / b for a, b in zip(rates[True], rates[False], strict=True))
        found = {"forced_share": median(shares), "gain": gain}
        found |= {"forced_tok_s": median(rates[True]), "guessed_tok_s": median(rates[False])}
        yield {"part": "json", "case": name, "rows": batch, **found}


@contextmanager
def _forced(is_on: bool) -> Iterator[None]:
    """Whether what a grammar leaves no choice about is drafted."""
    kept = GrammarRows.force, GrammarRows.only_way
    if not is_on:
        GrammarRows.force = lambda self, row, chain: []  # type: ignore[method-assign]
        GrammarRows.only_way = lambda self, row, num_tokens: []  # type: ignore[method-assign]
    try:
        yield
    finally:
        GrammarRows.force, GrammarRows.only_way = kept  # type: ignore[method-assign]


def schemas() -> list[dict[str, Any]]:
    """Schemas of many kinds and sizes, all different."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        {"type": "integer", "minimum": -5, "maximum": 10_000},
        {"type": "number"},
        {"type": "string", "format": "date-time"},
        {"enum": WORDS},
        {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        {"anyOf": [{"type": "null"}, {"type": "boolean"}, RECORD]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ]
    made = []
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        for first in range(len(kinds)):
            fields = {f"field_{first}_{i}": kinds[(first + i) % len(kinds)] for i in range(size)}
            made.append({"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False})
    return made


def hard_grammars(number: int) -> list[str]:
    """Grammars that are refused for the time they take, all different."""
    terms = range(60)
    return [
        f"start: X\nX: {' & '.join(f'A{i}' for i in terms)}\n"
        + "\n".join(f"A{i}: /(?s:.*)[A-Z]{{{i}}}{each % 10}(?s:.){{{100 + i + each}}}/" for i in terms)
        for each in range(number)
    ]


def compile_times(llm: LLM) -> Iterator[dict[str, Any]]:
    """Milliseconds until a schema can be used, its trial included."""
    llm._engine.find(compiled('start: "warm"'))  # starts the process that tries them
    times = []
    for schema in schemas():
        grammar, began = json_schema_grammar(schema), time.perf_counter()
        llm._engine.find(compiled(grammar))
        times.append(1e3 * (time.perf_counter() - began))
    times.sort()
    found = {"median_ms": median(times), "p99_ms": times[int(0.99 * len(times))], "most_ms": times[-1]}
    yield {"part": "compile", "schemas": len(times), **found}


def others(llm: LLM, num_new: int) -> Iterator[dict[str, Any]]:
    """Milliseconds between the tokens of a free stream, alone and while hard grammars are compiled."""
    for kind, grammars in (("alone", []), (f"{NUM_HARD} hard grammars", hard_grammars(NUM_HARD))):
        told: list[str] = []
        threads = [threading.Thread(target=_refused, args=(llm, each, told)) for each in grammars]
        for thread in threads:
            thread.start()
        gaps, last = [], time.perf_counter()
        for _ in llm.stream(prompts(1)[0], Options(temperature=0, max_new_tokens=num_new, ignore_eos=True)):
            now = time.perf_counter()
            gaps.append(1e3 * (now - last))
            last = now
        began, quick = time.perf_counter(), 0.0
        if grammars:  # somebody else's schema, which is no harder than most
            llm._engine.find(compiled(json_schema_grammar(RECORD | {"title": kind})))
            quick = 1e3 * (time.perf_counter() - began)
        for thread in threads:
            thread.join()
        gaps = sorted(gaps[1:])  # the first has the prefill
        found = {"p50_ms": median(gaps), "p99_ms": gaps[int(0.99 * len(gaps))], "most_ms": gaps[-1]}
        yield {"part": "others", "case": kind, **found, "usual_schema_ms": quick, "told": sorted(set(told))}


def _refused(llm: LLM, grammar: str, told: list[str]) -> None:
    try:
        llm._engine.find(compiled(grammar))
    except (RequestError, CapacityError) as error:
        told.append(str(error))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="steps,json,compile,others")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-new", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    report: list[dict[str, Any]] = []
    for name, spec in SPECS.items():
        with opened(spec, args.threads) as llm:
            found: list[Iterator[dict[str, Any]]] = []
            if "steps" in args.parts:
                found.append(step_costs(llm, name, args.rows, args.rounds, args.num_new))
            if "json" in args.parts and spec.spec != "none":
                found.append(json_rates(llm, name, args.rows[:-1], args.rounds))
            if "compile" in args.parts and spec.spec == "none":
                found.append(compile_times(llm))
            if "others" in args.parts and spec.spec == "none":
                found.append(others(llm, 400))
            for row in (row for each in found for row in each):
                report.append(row)
                print(json.dumps(row), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
