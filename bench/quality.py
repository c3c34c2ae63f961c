"""Quality of quantised forms: `python -m bench.quality`. Nats per token of one text, for each form of weights and KV.

The text is `bench/quality_text.txt`, written for this purpose, so that no model was trained on it; it is read as one
prompt, by the default model unless told. The first form is what the others are held against. A further form is a
further line of `FORMS`, or of `--forms`; one that the device does not take is listed with what start-up says of it.
Behind `±` is the standard error of the mean difference, over the tokens of the text.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from roost import LLM
from roost.config.options import EngineConfig, MemoryConfig, ModelConfig
from roost.errors import ConfigError
from roost.front.options import Options

TEXT = Path(__file__).with_name("quality_text.txt")
FORMS = [  # (--weights, --kv-cache-dtype)
    ("fp32", "auto"),
    ("fp32", "int8"),
    ("fp32", "fp8"),
    ("bf16", "auto"),
    ("bf16", "int8"),
    ("bf16", "fp8"),
    ("int8", "auto"),
    ("int8", "int8"),
    ("int8", "fp8"),
]
HEADS = ("weights", "KV", "nats per token", "more than the first", "same best token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a model made of the text."""

    nats: list[float]  # that each token costs, from the second on
    best: list[int]  # the token that it holds most likely there


def read(args: argparse.Namespace, weights: str, kv_cache_dtype: str) -> Reading:
    """Score the text with one form."""
    config = EngineConfig(
        model=ModelConfig(weights=weights, device=args.device, backend=args.backend),
        memory=MemoryConfig(kv_cache_dtype=kv_cache_dtype),
    )
    with LLM(args.model, config) as llm:
        options = Options(max_new_tokens=0, prompt_logprobs_from=0, logprobs=1)
        scored = llm.generate(TEXT.read_text(), options).prompt_logprobs
    return Reading(nats=[-entry.logprob for entry in scored], best=[entry.top_logprobs[0][0] for entry in scored])


def forms_of(text: str) -> list[tuple[str, str]]:
    """Forms as they are given: WEIGHTS:KV, several with commas between them."""
    forms = [tuple(form.split(":")) for form in text.split(",")]
    if any(len(form) != 2 for form in forms):
        raise argparse.ArgumentTypeError(f"must be WEIGHTS:KV, several with commas between them, got {text}")
    return [(weights, kv_cache_dtype) for weights, kv_cache_dtype in forms]


def main() -> None:
    """Print a line for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="as `roost serve` takes it")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--backend", default="auto", help="as `roost serve` takes it")
    parser.add_argument("--forms", type=forms_of, default=FORMS, help="WEIGHTS:KV,… in place of the usual ones")
    args = parser.parse_args()
    first: Reading | None = None
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|", flush=True)
    for weights, kv_cache_dtype in args.forms:
        try:
            found = read(args, weights, kv_cache_dtype)
        except ConfigError as error:
            print(f"| {weights} | {kv_cache_dtype} | refused: {error} | | |", flush=True)
            continue
        first = first or found
        same = mean(ours == theirs for ours, theirs in zip(found.best, first.best, strict=True))
        more = [ours - theirs for ours, theirs in zip(found.nats, first.nats, strict=True)]
        change = f"{mean(more):+.4f} ± {stdev(more) / len(more) ** 0.5:.4f}"
        print(f"| {weights} | {kv_cache_dtype} | {mean(found.nats):.4f} | {change} | {same:.1%} |", flush=True)
    if first is not None:
        print(f"\n{len(first.nats)} tokens of {TEXT.name}")


if __name__ == "__main__":
    main()
