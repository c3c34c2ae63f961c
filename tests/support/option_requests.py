"""What requests ask for, option by option: the request options of the table, greedy and seeded, near and past limits.

All of them are served side by side, so that rows of every kind share steps. Only data; the checks are elsewhere.
"""

from dataclasses import replace
from functools import cache
from typing import Any
from zlib import crc32

from roost.grammar.forms import choice_grammar, json_schema_grammar, regex_grammar
from roost.messages import Submit
from roost.sampling.params import SEED_END, SamplingParams
from tests.support.grammars import END
from tests.support.slow_reference import slow_output
from tests.support.spec_engines import repetitive, text_of
from tests.support.tiny_models import VOCAB

NUM_NEW = 16
SALT = "e"  # of the prompts: another if a choice is too close to call
GREEDY = SamplingParams(temperature=0)
STOPS = frozenset(range(1, VOCAB, 5))
FEW = (3, 17, 41, 60, 88)
SPECIAL = 2  # the token "<|im_end|>"
# what an output must match: many ways, ways that are forced, and no end
NUMBERS = json_schema_grammar({"type": "integer", "minimum": 0, "maximum": 99999})
WORDS = choice_grammar(["YES, IT IS", "YES, I KNOW", "NO, NEVER"])
ENDLESS = regex_grammar("([A-Z]{2,4}: [0-9], ){9,}")


def _sampled(**options: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**{"temperature": 0.8, **options})}


# For each option what its requests ask for; `stop` is added below, from what the outputs say.
ASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "temperature": (
        _sampled(temperature=0),
        _sampled(temperature=1e-3, seed=1),
        _sampled(temperature=0.5, seed=2),
        _sampled(temperature=1.0, seed=3),
        _sampled(temperature=2.0, seed=4),
    ),
    "top_k": (_sampled(top_k=1), _sampled(top_k=3, seed=5), _sampled(top_k=VOCAB + 7, seed=6)),
    "top_p": (_sampled(top_p=0.01, seed=7), _sampled(top_p=0.6, temperature=1.5, seed=8), _sampled(top_p=0.9, seed=9)),
    "min_p": (
        _sampled(min_p=0.5, seed=10),
        _sampled(min_p=0.1, temperature=1.5, seed=11),
        _sampled(min_p=0.3, temperature=0.3, seed=32),
    ),
    "repetition_penalty": (
        _sampled(temperature=0, repetition_penalty=1.3),
        _sampled(repetition_penalty=1.1, seed=12),
        _sampled(repetition_penalty=0.7, seed=13),
    ),
    "presence_penalty": (
        _sampled(temperature=0, presence_penalty=1.5),
        _sampled(presence_penalty=0.8, seed=14),
        _sampled(presence_penalty=-1.0, seed=15),
    ),
    "frequency_penalty": (
        _sampled(temperature=0, frequency_penalty=0.7),
        _sampled(frequency_penalty=0.3, seed=16),
        _sampled(frequency_penalty=-0.5, seed=17),
        _sampled(frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.1, top_k=20, top_p=0.95, seed=18),
    ),
    "logit_bias": (
        _sampled(temperature=0, logit_bias=tuple((token, 4.0) for token in FEW)),
        _sampled(logit_bias=tuple((token, -100.0) for token in range(0, 60)), seed=19),
        _sampled(logit_bias=tuple((token, 5.0) for token in FEW), frequency_penalty=0.5, seed=20),
    ),
    "seed": tuple(_sampled(temperature=1.0, seed=seed) for seed in (0, 1, 2**31, 2**62 + 5, SEED_END - 1)),
    "max_new_tokens": tuple(
        {"max_new_tokens": length, "sampling": sampling}
        for length in (0, 1, 2, 3, 4, 5, 6, 7)
        for sampling in (GREEDY, SamplingParams(temperature=0.4, seed=length))
    ),
    "stop_token_ids": (
        {"stop_token_ids": STOPS},
        {"stop_token_ids": STOPS},
        {"stop_token_ids": STOPS, "num_top_logprobs": 1},
        {"stop_token_ids": STOPS, **_sampled(seed=21)},
        {"stop_token_ids": STOPS, **_sampled(seed=22, frequency_penalty=0.3)},
    ),
    "min_new_tokens": (
        {"stop_token_ids": STOPS, "min_new_tokens": 6},
        {"stop_token_ids": STOPS, "min_new_tokens": 9, **_sampled(seed=23)},
        {"stop_token_ids": STOPS, "min_new_tokens": 5, **_sampled(seed=24, repetition_penalty=1.1)},
        {"stop_token_ids": STOPS, "min_new_tokens": NUM_NEW},
    ),
    "stop": (
        {},
        {},
        {"min_new_tokens": 5},
        {"stop_token_ids": STOPS},
        _sampled(seed=25),
        _sampled(seed=26, presence_penalty=0.4),
    ),
    "stop_in_special": tuple(
        {"stop": ("<|im_end|>",), "stop_in_special": shown, **_sampled(logit_bias=((SPECIAL, 3.0),), seed=35)}
        for shown in (False, True)
    ),
    "logprobs": (
        {"num_top_logprobs": 0},
        {"num_top_logprobs": 5},
        {"num_top_logprobs": 1, **_sampled(seed=29)},
        {"num_top_logprobs": 3, **_sampled(seed=30, frequency_penalty=0.5, top_k=8)},
        {"num_top_logprobs": 20, "max_new_tokens": 6},
    ),
    "grammar": tuple(
        {"grammar": grammar, "stop_token_ids": frozenset({END}), **ask}
        for grammar in (NUMBERS, WORDS, ENDLESS)
        for ask in ({}, _sampled(seed=33), _sampled(seed=34, logit_bias=((END, 2.0),), frequency_penalty=0.5, top_k=9))
    ),
    "prompt_logprobs_from": (
        {"prompt_logprobs_from": 0},
        {"prompt_logprobs_from": 5, "num_top_logprobs": 4},
        {"prompt_logprobs_from": 0, "num_top_logprobs": 2, "max_new_tokens": 0},
        {"prompt_logprobs_from": 13, "num_top_logprobs": 0, **_sampled(seed=31)},
    ),
}


@cache
def asked(kind: str = "forgetful") -> tuple[Submit, ...]:
    """All requests."""
    asks = [(f"{option} {number}", ask) for option, many in ASKS.items() for number, ask in enumerate(many)]
    submits = []
    for name, ask in asks:
        (prompt,) = repetitive(1, seed=crc32(f"{name}{SALT}".encode()))  # of its own, whatever joins the list
        usual = {"request_id": name, "tokens": prompt, "max_new_tokens": NUM_NEW, "sampling": GREEDY}
        submits.append(Submit(**{**usual, **ask}))
    return tuple(_with_stop(kind, each) if each.request_id.startswith("stop ") else each for each in submits)


def of(option: str, kind: str = "forgetful") -> list[Submit]:
    """The requests of one option."""
    return [each for each in asked(kind) if each.request_id.rpartition(" ")[0] == option]


def _with_stop(kind: str, submit: Submit) -> Submit:
    """With stop strings that the output comes to: the end of one token, all of another; and one it never says."""
    output, _ = slow_output(kind, submit)
    said = text_of(output[min(6, len(output) - 2) :])
    return replace(submit, stop=(said[:2], said[:2] + "never", "zzzz"))
