"""Speculation draws from the very distribution: outputs of many seeds against exact probabilities."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from math import sqrt

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.heads import TargetHead
from roost.messages import Submit
from roost.sampling.params import SamplingParams
from tests.support.plain_sampler import Case, changed_logits, distribution
from tests.support.spec_engines import MODES
from tests.support.tiny_models import SHAPE, Served, Tiny, configure

SMALL = 6
NUM_SEEDS = 500
NUM_NEW = 4  # the first token is of the prefill, the others of rounds
PROMPT = (1, 4, 2, 4, 2, 4)
OPTIONS = {
    "warm": SamplingParams(),
    "cut": SamplingParams(temperature=1.4, top_k=5, top_p=0.95, min_p=0.02),
    "penalised": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.7, logit_bias=((3, 0.8),)
    ),
}

DRAWN = [
    ("warm", "tree", 1),
    ("cut", "chain", 1),
    ("cut", "n-gram", 1),
    ("penalised", "tree", 0),
    ("warm", "joint", 1),
    ("cut", "joint tree", 0),
]
PRODUCT = product(OPTIONS, ("chain", "tree", "n-gram", "joint", "joint tree"), (0, 1))
REST = [pytest.param(*each, marks=pytest.mark.full) for each in PRODUCT if each not in DRAWN]


@cache
def small() -> Tiny:
    """A checkpoint of a small vocabulary, unsure enough that every token comes."""
    torch.manual_seed(5)
    sizes = {**SHAPE, "vocab_size": SMALL, "num_hidden_layers": 2, "initializer_range": 0.15}
    return Tiny(reference=LlamaForCausalLM(LlamaConfig(**sizes)).eval())


@cache
def logits_after(output: tuple[int, ...]) -> np.ndarray:
    """What the reference makes of the prompt and some output."""
    with torch.no_grad():
        return small().reference(torch.tensor([PROMPT + output])).logits[0, -1].numpy()


def exact(sampling: SamplingParams, num_tokens: int) -> dict[tuple[int, ...], float]:
    """The probability of every output."""
    shares = {(): 1.0}
    for _ in range(num_tokens):
        grown = {}
        for output, share in shares.items():
            changed = changed_logits(Case(sampling=sampling, prompt=PROMPT, output=output), logits_after(output), 0)
            follows, unsure = distribution(sampling, changed)
            assert not unsure
            grown |= {(*output, token): share * each for token, each in follows.items()}
        shares = grown
    return shares


def chi_square(counts: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """How far counts are from what is expected, rare outcomes put together; and the degrees of freedom."""
    total = counts.total()
    common = [(counts[each], share * total) for each, share in shares.items() if share * total >= 5]
    seen, wanted = (total - sum(column) for column in zip(*common, strict=True))
    if wanted >= 5:
        common.append((seen, wanted))
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in common), len(common) - 1


def limit(freedom: int) -> float:
    """What a right distribution stays below: four standard deviations past the mean."""
    return freedom + 4 * sqrt(2 * freedom)


@cache
def outputs(name: str, mode: str, depth: int) -> tuple[list[tuple[int, ...]], int]:
    """The outputs of one prompt under many seeds, in one batch; and how many drafts were accepted."""
    model, shape = small().model(), MODES[mode]
    config = configure(depth=depth, spec=shape, max_running=NUM_SEEDS, pool_tokens=NUM_SEEDS * 128, chunk=8192)
    served = Served(model, config, head=TargetHead(model) if shape.pair else None)
    for seed in range(NUM_SEEDS):
        sampling = replace(OPTIONS[name], seed=seed)
        served.post(Submit(request_id=str(seed), tokens=PROMPT, max_new_tokens=NUM_NEW, sampling=sampling))
    served.run()
    accepted = sum(served.finish(str(seed)).spec.drafts_accepted for seed in range(NUM_SEEDS))
    return [served.output(str(seed)) for seed in range(NUM_SEEDS)], accepted


@pytest.mark.parametrize(("name", "mode", "depth"), DRAWN + REST)
def test_outputs_of_speculative_rounds_follow_the_exact_distribution(name: str, mode: str, depth: int) -> None:
    found, accepted = outputs(name, mode, depth)
    assert accepted > NUM_SEEDS / 10  # drafts were really in play
    shares = exact(OPTIONS[name], NUM_NEW)
    for part in (slice(0, 2), slice(1, 3), slice(2, 4)):  # neighbours: prefill and round, inside a round, later
        wanted: Counter[tuple[int, ...]] = Counter()
        for output, share in shares.items():
            wanted[output[part]] += share  # type: ignore[assignment]
        distance, freedom = chi_square(Counter(output[part] for output in found), dict(wanted))
        assert freedom > 10
        assert distance < limit(freedom), (part, distance, freedom)


def test_the_check_tells_a_wrong_distribution() -> None:
    found, _ = outputs("warm", "tree", 1)
    distance, freedom = chi_square(Counter(output[:2] for output in found), exact(OPTIONS["cut"], 2))
    assert distance > limit(freedom)
