"""Sampling options: what is allowed, what is refused and under which name."""

import math
from typing import Any

import pytest

from roost.errors import RequestError
from roost.sampling.params import LOGIT_BIAS_ENTRIES_MAX, LOGIT_BIAS_MAX, SEED_END, TOP_K_MAX, SamplingParams
from roost.values import fitted

VOCAB_SIZE = 100
NO_NUMBERS = (math.nan, math.inf, -math.inf, True, False, "1", None)
NO_WHOLE_NUMBERS = (*NO_NUMBERS, 2.0, 1.5)

REFUSED: dict[str, tuple[Any, ...]] = {
    "temperature": (*NO_NUMBERS, -0.1, 100.1, 101, 10**30),
    "top_k": (*NO_WHOLE_NUMBERS, -1.0, 0, -2, 2**31, 10**30),
    "top_p": (*NO_NUMBERS, 0, 0.0, -0.5, 1.0001, 2),
    "min_p": (*NO_NUMBERS, -0.001, 1.1),
    "repetition_penalty": (*NO_NUMBERS, 0, 0.0, -1, 10.5),
    "presence_penalty": (*NO_NUMBERS, -2.1, 3),
    "frequency_penalty": (*NO_NUMBERS, -3, 2.0001),
    "seed": (*NO_WHOLE_NUMBERS, -1, 2**63),
    "logit_bias": (
        *(((3, value),) for value in (*NO_NUMBERS, 100.5, -101)),
        *(((token_id, 1.0),) for token_id in (*NO_WHOLE_NUMBERS, -1, VOCAB_SIZE)),
        ((1, 1.0), (2, 1.0), (1, 1.0)),
        tuple((token_id, 1.0) for token_id in range(1025)),
    ),
}
ALLOWED: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, 1e-300, 1, 100, 100.0),
    "top_k": (-1, 1, 50, 2**31 - 1),
    "top_p": (1e-300, 0.5, 1, 1.0),
    "min_p": (0, 0.0, 1, 0.3),
    "repetition_penalty": (1e-300, 1, 10),
    "presence_penalty": (-2, 2.0),
    "frequency_penalty": (-2.0, 2),
    "seed": (0, 2**63 - 1),
    "logit_bias": ((), ((0, -100), (VOCAB_SIZE - 1, 100.0))),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        fitted(SamplingParams(**{name: value})).check(VOCAB_SIZE)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert any(word in str(caught.value) for word in ("must be", "at most"))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in ALLOWED for value in ALLOWED[name]])
def test_a_good_value_passes(name: str, value: Any) -> None:
    fitted(SamplingParams(**{name: value})).check(VOCAB_SIZE)


def test_a_thousand_and_twenty_four_biases_pass() -> None:
    SamplingParams(logit_bias=tuple((token_id, 1.0) for token_id in range(1024))).check(2000)


@pytest.mark.parametrize("name", ["temperature", "top_k", "seed"])
def test_an_endless_number_is_refused_without_writing_it_out(name: str) -> None:
    with pytest.raises(RequestError, match="more than 64 bits"):
        fitted(SamplingParams(**{name: 10**5000})).check(VOCAB_SIZE)  # type: ignore[arg-type]


def test_every_option_is_checked() -> None:
    assert set(REFUSED) == set(ALLOWED) == set(SamplingParams.__dataclass_fields__)


def test_greedy_is_no_temperature_or_one_token() -> None:
    assert SamplingParams(temperature=0).greedy and SamplingParams(temperature=0.7, top_k=1).greedy
    assert not SamplingParams().greedy and not SamplingParams(top_k=2).greedy


@pytest.mark.parametrize("change", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.5}])
def test_a_penalty_is_seen(change: dict[str, float]) -> None:
    penalising = SamplingParams(temperature=0, **change)  # type: ignore[arg-type]
    assert penalising.penalises and penalising.greedy and not penalising.plain_greedy


def test_plain_greedy_is_greedy_on_the_models_own_logits() -> None:
    assert SamplingParams(temperature=0, top_p=0.5, min_p=0.5, seed=3).plain_greedy
    assert not SamplingParams(temperature=0, logit_bias=((1, 1.0),)).plain_greedy
    assert not SamplingParams().plain_greedy


LIMITS: list[tuple[str, Any, Any]] = [  # option, what is just allowed, the least that is not
    ("top_k", TOP_K_MAX, TOP_K_MAX + 1),
    ("seed", SEED_END - 1, SEED_END),
    ("logit_bias", ((0, LOGIT_BIAS_MAX),), ((0, math.nextafter(LOGIT_BIAS_MAX, math.inf)),)),
    ("logit_bias", ((0, -LOGIT_BIAS_MAX),), ((0, math.nextafter(-LOGIT_BIAS_MAX, -math.inf)),)),
    ("logit_bias", *(tuple((i, 1.0) for i in range(LOGIT_BIAS_ENTRIES_MAX + more)) for more in (0, 1))),
]


@pytest.mark.parametrize(("name", "allowed", "refused"), LIMITS, ids=lambda value: str(value)[:20])
def test_an_option_has_the_range_that_it_says(name: str, allowed: Any, refused: Any) -> None:
    SamplingParams(**{name: allowed}).check(2 * LOGIT_BIAS_ENTRIES_MAX)
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: refused}).check(2 * LOGIT_BIAS_ENTRIES_MAX)
    assert caught.value.param == name
