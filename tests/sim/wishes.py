"""Wishes: request options that simulated clients use, and the oracle of stop strings.

A stop string is one token id, or two that follow each other, written as text. Token 0 is the special one: it is
no text unless a request says that it is. The same rule, applied to a whole output at once, is the oracle.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from roost.messages import GREEDY, Submit
from roost.sampling.params import SamplingParams
from tests.sim.automaton import END

SPECIAL = 0
GRAMMAR_SEEDS = 0.25  # share of the seeds with grammars
PENALISING = (
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(temperature=0, presence_penalty=0.5),
    SamplingParams(temperature=0, frequency_penalty=0.5),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Share of the requests with each option; for the last two, share of the ticks."""

    priority: float
    timeout: float
    group: float
    stop_string: float
    min_new: float
    prompt_logprobs: float
    output_logprobs: float
    penalty: float
    stats: float
    flush: float


def draw_wishes(rng: random.Random, calm: bool) -> Wishes:
    """The wishes of a seed's clients."""
    return Wishes(
        priority=rng.choice([0, 0, 0.5]),
        timeout=0 if calm else rng.choice([0, 0, 0.1, 0.4]),
        group=rng.choice([0, 0.2, 0.5]),
        stop_string=rng.choice([0, 0.3]),
        min_new=rng.choice([0, 0.4]),
        prompt_logprobs=rng.choice([0, 0, 0.4]),
        output_logprobs=rng.choice([0, 0.4]),
        penalty=rng.choice([0, 0.3]),
        stats=rng.choice([0, 0.05]),
        flush=rng.choice([0, 0.03]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What one request asks for."""

    priority: int
    timeout_ms: int | None
    stop: tuple[str, ...]
    stop_in_special: bool
    min_new_tokens: int
    prompt_logprobs_from: int | None
    num_top_logprobs: int | None
    sampling: SamplingParams


def draw_extras(rng: random.Random, wishes: Wishes, vocab: int, prompt_len: int, max_new: int | None) -> Extras:
    """The wishes of one request with `prompt_len` tokens of its own."""

    def wished(share: float) -> bool:
        return rng.random() < share

    return Extras(
        priority=rng.choice([-1, 1, 1, 5]) if wished(wishes.priority) else 0,
        timeout_ms=rng.choice([1, 3, 10, 30, 80]) if wished(wishes.timeout) else None,
        stop=tuple(_stop_string(rng, vocab) for _ in range(rng.randint(1, 3))) if wished(wishes.stop_string) else (),
        stop_in_special=wished(0.5),
        min_new_tokens=rng.randint(0, 6 if max_new is None else min(max_new, 6)) if wished(wishes.min_new) else 0,
        prompt_logprobs_from=rng.randint(0, prompt_len) if wished(wishes.prompt_logprobs) else None,
        num_top_logprobs=rng.choice([0, 1, 3]) if wished(wishes.output_logprobs) else None,
        sampling=rng.choice(PENALISING) if wished(wishes.penalty) else GREEDY,
    )


def with_grammar(submit: Submit, seed: int, vocab: int) -> Submit:
    """In a quarter of the seeds, half of the requests must match a grammar; by a die of its own."""
    if random.Random(f"grammars {seed}").random() >= GRAMMAR_SEEDS:
        return submit
    rng = random.Random(f"grammar {seed} {submit.request_id}")
    if rng.random() < 0.5:
        return submit
    grammar = f"automaton {rng.randrange(2**32)} {vocab}"
    return replace(submit, grammar=grammar, stop_token_ids=submit.stop_token_ids | {END}, min_new_tokens=0)


def compiles_at_once(grammar: str, done: Callable[[None], None]) -> None:
    """What compiles the grammars of a simulated engine."""
    done(None)


def _stop_string(rng: random.Random, vocab: int) -> str:
    return " ".join(str(rng.randrange(vocab)) for _ in range(rng.choice([1, 2, 2, 2])))


@dataclass(slots=True)
class SimStopFinder:
    """The engine's stop-string finder in a simulated world."""

    stops: tuple[str, ...]
    in_special: bool
    last: str = ""  # text of the last token that has one
    done: bool = field(default=False)

    def skip(self, tokens: Sequence[int]) -> None:
        """Tokens in which no stop counts; their texts are whole, so nothing is left of them."""

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Index of the token that completes a stop string, and which one."""
        assert not self.done, "a stop finder is fed after it has found"
        for index, token in enumerate(tokens):
            if token == SPECIAL and not self.in_special:
                continue
            pair, self.last = f"{self.last} {token}", str(token)
            found = pair if pair in self.stops else self.last if self.last in self.stops else None
            if found is not None:
                self.done = True
                return index, found
        return None


def first_stop(submit: Submit, output: Sequence[int]) -> tuple[int, int | str] | None:
    """The oracle: length of the output at its first stop, and which stop that is; None if there is none."""
    texts = [(i, str(token)) for i, token in enumerate(output) if token != SPECIAL or submit.stop_in_special]
    texts = [(i, text) for i, text in texts if i >= submit.min_new_tokens]
    pairs = [(i, f"{before} {text}") for (_, before), (i, text) in pairwise(texts)]
    found: list[tuple[int, int, int | str]] = [(i, 2, text) for i, text in texts if text in submit.stop]
    found += [(i, 1, pair) for i, pair in pairs if pair in submit.stop]
    found += [
        (i, 0, token) for i, token in enumerate(output) if i >= submit.min_new_tokens and token in submit.stop_token_ids
    ]
    return (min(found)[0] + 1, min(found)[2]) if found else None
