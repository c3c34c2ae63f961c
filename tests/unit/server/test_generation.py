"""Outputs of one request: as many as it may have, and one error where it asks for more."""

from types import SimpleNamespace
from typing import Any

import pytest

from roost.errors import RequestError
from roost.front.options import N_MAX, TIMEOUT_S_MIN, Options, milliseconds, submits
from roost.sched.intake import TIMEOUT_MS_MAX
from roost.server.generation import OUTPUTS_MAX, Generation, Prompt
from tests.support.small_vocabularies import byte_level

TOKENIZER = byte_level()
ANY: Any = SimpleNamespace(new_id=lambda: "e", tokenizer=TOKENIZER)  # an engine, a language


@pytest.mark.parametrize("n", [0, 1, N_MAX, N_MAX + 1])
def test_a_prompt_has_as_many_outputs_as_may_be_asked_for(n: int) -> None:
    if 1 <= n <= N_MAX:
        assert len(submits("r", (1,), Options(n=n), TOKENIZER)) == n
    else:
        with pytest.raises(RequestError, match=rf"n: must be in \[1, {N_MAX}\], got {n}"):
            submits("r", (1,), Options(n=n), TOKENIZER)


@pytest.mark.parametrize("num_more", [-1, 0, 1])
def test_all_prompts_together_have_as_many_outputs_as_one_request_may(num_more: int) -> None:
    asked = [N_MAX] * (OUTPUTS_MAX // N_MAX)
    asked = [*asked[:-1], N_MAX - 1] if num_more < 0 else asked + [1] * num_more
    prompts = [Prompt(request_id=str(i), tokens=(1,), options=Options(n=n)) for i, n in enumerate(asked)]
    if num_more <= 0:
        assert len(Generation(ANY, ANY, ANY, prompts).outputs) == OUTPUTS_MAX + num_more
    else:
        with pytest.raises(RequestError, match=f"n: all prompts together may have {OUTPUTS_MAX} outputs"):
            Generation(ANY, ANY, ANY, prompts)


def test_a_time_is_at_least_a_millisecond_and_at_most_what_the_engine_takes() -> None:
    assert milliseconds("timeout", TIMEOUT_S_MIN) == 1
    assert milliseconds("timeout", 1e9) <= TIMEOUT_MS_MAX
    for seconds in (TIMEOUT_S_MIN / 2, 0.0, -1.0, 1.1e9, float("nan")):
        with pytest.raises(RequestError, match="timeout: must be in"):
            milliseconds("timeout", seconds)
