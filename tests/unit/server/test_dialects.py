"""Dialects: a body has a field for each sampling parameter that its dialect knows, by the names it has there."""

import json

import pytest

from roost.errors import RequestError
from roost.front.options import Options
from roost.server.body_reader import convert
from roost.server.compat import Strict
from roost.server.dialects import Dialect, sampling_of, with_sampling

OTHER = Dialect(names={"min_p": "floor"}, synonyms={"temperature": "heat"}, lacks=frozenset({"top_k", "logit_bias"}))


@with_sampling(OTHER)
class OtherBody(Strict):
    """A body of no known server."""

    text: str = ""


def _sampling(**given: object) -> dict[str, object]:
    return sampling_of(convert(json.dumps(given).encode(), OtherBody), OTHER)


def test_a_dialect_has_its_own_names_for_parameters() -> None:
    assert _sampling(floor=0.5, heat=2, text="a") == {"min_p": 0.5, "temperature": 2}
    assert _sampling(temperature=0.5, seed=-1) == {"temperature": 0.5, "seed": 2**63 - 1}


def test_what_is_absent_or_null_keeps_its_default() -> None:
    assert _sampling(floor=None, text="a") == {} and Options(**_sampling()) == Options()


@pytest.mark.parametrize("name", ["min_p", "top_k", "logit_bias"])
def test_a_name_that_a_dialect_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        _sampling(**{name: 1})
    assert (caught.value.param, caught.value.reason) == (name, "is not a parameter of this endpoint")


def test_of_two_names_of_one_parameter_only_one_may_be_given() -> None:
    with pytest.raises(RequestError) as caught:
        _sampling(temperature=1, heat=1)
    assert (caught.value.param, caught.value.reason) == ("temperature", "is the same as heat: give one of them")
