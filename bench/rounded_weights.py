"""Quality of weights rounded at load: `python -m bench.rounded_weights TEXT`. Nats per token of a text, without a GPU.

Each form that quantises (`layers.linear.FORMS`) rounds the default model's matrices, which are then computed with in
float32: what the form loses, and nothing else. Beside it, tokens are rounded to FP8 as well, as in large steps of FP8.
The first line, float32, is what the others are held against.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from unittest.mock import patch

from torch import Tensor

from roost import LLM
from roost.config.options import EngineConfig, ModelConfig
from roost.front.options import Options
from roost.layers import linear
from roost.layers.fp8 import round_tokens
from roost.layers.quantised import QuantisedWeight


@contextmanager
def rounded(quantise: Callable[[Tensor], QuantisedWeight]) -> Iterator[None]:
    """Every matrix that a model loads in here is what is left of it after rounding."""
    make = linear.make_linear

    def make_rounded(weight: Tensor, bias: Tensor | None, weights: str) -> linear.Linear:
        return make(quantise(weight).dequantise(), bias, weights)

    with patch("roost.models.decoder.make_linear", make_rounded):
        yield


@contextmanager
def rounded_tokens() -> Iterator[None]:
    """Every projection made in here reads tokens that are rounded to FP8."""
    plain = linear._padded_linear

    def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        values, scales = round_tokens(hidden)
        return plain(values.float() * scales, weight, bias)

    with patch("roost.layers.linear._padded_linear", project):
        yield


def read(text: str) -> tuple[list[float], list[int]]:
    """What each token of a text costs, from the second on, and which token was held most likely there."""
    with LLM("default", EngineConfig(model=ModelConfig(weights="fp32", device="cpu"))) as llm:
        scored = llm.generate(text, Options(max_new_tokens=0, prompt_logprobs_from=0, logprobs=1)).prompt_logprobs
    return [-entry.logprob for entry in scored], [entry.top_logprobs[0][0] for entry in scored]


def main() -> None:
    """Print a line for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file, read as one prompt")
    text = parser.parse_args().text.read_text()
    nats, best = read(text)
    print("| weights | nats per token | more than fp32 | same best token |\n|---|---|---|---|")

    def report(name: str) -> None:
        own, own_best = read(text)
        same = mean(ours == theirs for ours, theirs in zip(own_best, best, strict=True))
        print(f"| {name} | {mean(own):.4f} | {mean(own) - mean(nats):+.4f} | {same:.1%} |", flush=True)

    print(f"| fp32 | {mean(nats):.4f} | | |", flush=True)
    for name, form in linear.FORMS.items():
        if form.quantise is not None:
            with rounded(form.quantise):
                report(name)
                if name == "fp8":
                    with rounded_tokens():
                        report("fp8, tokens too")
    print(f"\n{len(nats)} tokens")


if __name__ == "__main__":
    main()
