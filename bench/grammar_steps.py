"""What a grammar costs a step: `python -m bench.grammar_steps --tokenizer tokenizer.json --out FOLDER`.

Random weights in the shape of Llama-8B (or others), rows that decode freely and the same rows under a JSON schema, by
turns in one process: plain, and with an EAGLE-3 head whose accept length is held at 2.5. Since the head is random and
acceptance simulated, a matcher that is given what its grammar forbids stays where it is: times are real, texts are
not. Then what masks take on the host, by vocabulary, rows and nodes.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from bench.gpu_shapes import DEVICE, SHAPES, RandomState
from bench.gpu_table import CHAIN, Case, measure
from bench.heads import untrained_head
from roost.config.options import EngineConfig, SpecConfig
from roost.grammar.compiler import Compiler
from roost.grammar.matcher import Mask, Matcher, NewMatcher, num_words
from roost.grammar.rows import GrammarRows
from roost.models.decoder import Decoder
from roost.sampling.params import SamplingParams
from roost.startup import backend_of, ops_of
from roost.step import RowId, RowSetup
from roost.text.tokenizer import Tokenizer


def grammar_of(properties: dict[str, Any]) -> str:
    """The grammar of an endless list of objects, so that no row ends."""
    item = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    schema = {"type": "array", "minItems": 10_000, "items": item, "x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": schema}]})


WORDS = ["open", "closed", "draft", "in review", "accepted", "rejected", "archived", "unknown"]
GRAMMAR = grammar_of(
    {
        "id": {"type": "integer", "minimum": 0},
        "state": {"enum": WORDS},
        "due": {"type": "string", "format": "date"},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": WORDS}, "maxItems": 4},
        "owner": {
            "type": "object",
            "properties": {"team": {"enum": WORDS}, "is_lead": {"type": "boolean"}},
            "required": ["team", "is_lead"],
            "additionalProperties": False,
        },
    }
)
# free text with a bound on its length: what llguidance's tables of a vocabulary help least with
BOUNDED = grammar_of({"text": {"type": "string", "maxLength": 24}})
REPEATS = 3


class Patient:
    """A matcher that takes every token, and goes on by those that its grammar allows."""

    def __init__(self, inner: Matcher) -> None:
        self._inner = inner
        self._moved: list[bool] = []  # for each token, whether the grammar allowed it

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next."""
        self._inner.fill(mask)

    def consume(self, token: int) -> bool:
        """Go on, if that is allowed."""
        self._moved.append(self._inner.consume(token))
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        for _ in range(num_tokens):
            if self._moved.pop():
                self._inner.rollback(1)

    def forced(self) -> list[int]:
        """What must come next."""
        return self._inner.forced()

    def error(self) -> str:
        """Never one."""
        return ""


def patient(compiler: Compiler) -> NewMatcher:
    """Makes such matchers."""
    return lambda text: Patient(compiler.new_matcher(text))


def tokenizer_at(path: Path) -> Tokenizer:
    """A byte-level tokenizer from its tokenizer.json; its first token ends outputs."""
    return Tokenizer(tokenizers.Tokenizer.from_str(path.read_text()), spelling="byte-level", eos_ids=[0])


def mask_times(
    compiler: Compiler, vocab_size: int, num_rows: int, num_nodes: int, grammar: str = GRAMMAR
) -> dict[str, Any]:
    """Host time of one step's forced drafts and masks: rows in different places of their outputs, right drafts."""
    rows, drafts, setups = GrammarRows(compiler.new_matcher), [], []
    for row in range(num_rows):
        matcher, output = compiler.new_matcher(grammar), list[int]()
        mask = np.zeros(num_words(vocab_size), dtype=np.int32)
        for place in range(row % 40 + num_nodes):
            matcher.fill(mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
            output.append(int(allowed[(7919 * (row + 3 * place)) % len(allowed)]))
            matcher.consume(output[-1])
        known = np.array(output[: row % 40], dtype=np.int32)
        usual = {"sampling": SamplingParams(), "prompt_len": 0, "min_len": 0, "stop_ids": ()}
        setups.append(RowSetup(row=RowId(row), tokens=known, grammar=grammar, **usual))  # type: ignore[arg-type]
        drafts.append(output[row % 40 :][: num_nodes - 1])
    masks = np.empty((num_rows, num_nodes, num_words(vocab_size)), dtype=np.int32)
    parents = [max(0, node - 1) for node in range(num_nodes)]
    spent = {"forced": list[float](), "masks": list[float]()}
    for _ in range(20):
        for setup in setups:
            rows.begin(setup)  # a mask that was computed before is not computed again
        began = time.perf_counter()
        for row, chain in enumerate(drafts):
            rows.force(row, list(chain))
        between = time.perf_counter()
        for row, chain in enumerate(drafts):
            rows.fill(row, [0, *chain], parents, masks[row])
        spent["forced"].append(between - began)
        spent["masks"].append(time.perf_counter() - between)
    best = {name: 1e3 * min(times) for name, times in spent.items()}
    return {
        "vocab": vocab_size,
        "rows": num_rows,
        "nodes": num_nodes,
        "forced_ms": best["forced"],
        "masks_ms": best["masks"],
        "us_per_mask": 1e3 * best["masks"] / (num_rows * num_nodes),
    }


def step_costs(
    shape: str, weights: str, batches: Sequence[int], num_new: int, compiler: Compiler
) -> list[dict[str, Any]]:
    """Free and constrained steps by turns."""
    config = SHAPES[shape]
    model = Decoder(config, RandomState(config), weights, DEVICE, ops_of(backend_of(EngineConfig(), DEVICE)))
    head = untrained_head("eagle3", model, weights, DEVICE, num_tokens=min(32000, config.vocab_size))
    found = []
    for batch in batches:
        for name, spec in (("plain", SpecConfig()), ("eagle3 2.5 (simulated)", CHAIN)):
            times: dict[str, list[float]] = {"free": [], "constrained": []}
            for _ in range(REPEATS):
                for kind, grammar in (("free", ""), ("constrained", GRAMMAR)):
                    case = Case(name=name, batch=batch, depth=1, spec=spec, num_new=num_new, grammar=grammar)
                    times[kind].append(measure(model, head, case, patient(compiler))["ms_per_step"])
            free, constrained = min(times["free"]), min(times["constrained"])
            row = {"shape": shape, "case": name, "batch": batch, "free_ms": free, "constrained_ms": constrained}
            found.append({**row, "ratio": constrained / free, "all": times})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, nargs="+", required=True, help="the first one is the model's")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64], help="none: masks alone")
    parser.add_argument("--num-new", type=int, default=200)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU (rehearsal)"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "masks": []}
    for path in args.tokenizer:
        tokenizer = tokenizer_at(path)
        vocab_size = tokenizer.vocab_size
        compiler = Compiler(tokenizer, vocab_size)
        for num_rows, num_nodes in ((1, 1), (8, 1), (64, 1), (1, 4), (8, 4), (64, 4)):
            for name, grammar in (("fields", GRAMMAR), ("bounded text", BOUNDED)):
                times = mask_times(compiler, vocab_size, num_rows, num_nodes, grammar)
                report["masks"].append({"grammar": name, **times})
                print(json.dumps(report["masks"][-1]), flush=True)
    if args.batches:
        compiler = Compiler(tokenizer_at(args.tokenizer[0]), SHAPES[args.shape].vocab_size)
        report["steps"] = step_costs(args.shape, args.weights, args.batches, args.num_new, compiler)
    if args.out is not None:
        (args.out / "grammar_steps.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
