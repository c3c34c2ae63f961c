"""Dialects: how OpenAI's and SGLang's bodies spell the options of a request, in one table each.

A body gets a field for each sampling parameter of `sampling.params`, unless its dialect lacks it; null is the
parameter's default. All other options are fields that `schema` writes out. Called by `schema` and, for the names in
error messages, by the endpoints.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from roost.errors import RequestError
from roost.front.options import OPENAI_NAMES
from roost.sampling.params import LOGIT_BIAS_ENTRIES_MAX, SEED_END, SamplingParams

Body = TypeVar("Body", bound=msgspec.Struct)
# Every output of a request carries these to the engine, so their number is bounded here already.
Biases = Annotated[dict[str, float], Meta(max_length=LOGIT_BIAS_ENTRIES_MAX)]
_TOKEN_ID = re.compile(r"[0-9]{1,18}")  # more digits may not fit 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a family of bodies calls the options of a request, where that is not the option's own name."""

    names: Mapping[str, str] = field(default_factory=dict)
    synonyms: Mapping[str, str] = field(default_factory=dict)  # second names of sampling parameters
    lacks: frozenset[str] = frozenset()  # sampling parameters without a field

    def spellings(self, parameter: str) -> list[str]:
        """The fields that a sampling parameter has, its usual name first."""
        if parameter in self.lacks:
            return []
        second = self.synonyms.get(parameter)
        return [self.names.get(parameter, parameter), *([] if second is None else [second])]


OPENAI = Dialect(names=OPENAI_NAMES)
SGLANG = Dialect(synonyms={"seed": "sampling_seed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """How a sampling parameter is written in JSON, where that is not its own type and value."""

    type: Any
    read: Callable[[Any], Any]  # from what is written to the parameter


def bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """Biases by token id; JSON's keys are texts."""
    if wrong := [token for token in biases if not _TOKEN_ID.fullmatch(token)]:
        raise RequestError(400, "logit_bias", f"keys must be token ids, got {wrong[0][:40]!r}")
    return tuple((int(token), value) for token, value in biases.items())


def _seed(seed: int) -> int:
    """A seed as OpenAI allows it, negative ones too."""
    if abs(seed) >= SEED_END:
        raise RequestError(400, "seed", "must be less than 2**63 in size")
    return seed % SEED_END


_WRITTEN = {
    "top_k": Written(type=int, read=lambda top_k: top_k or -1),  # 0 is all, as -1 is
    "logit_bias": Written(type=Biases, read=bias),
    "seed": Written(type=int, read=_seed),
}


def with_sampling(dialect: Dialect) -> Callable[[type[Body]], type[Body]]:
    """Decorates a body: adds a field for each sampling parameter of the dialect, null unless it is given."""

    def extended(body: type[Body]) -> type[Body]:
        added = [
            (name, _kind(each) | None, None) for each in fields(SamplingParams) for name in dialect.spellings(each.name)
        ]
        namespace = {"__doc__": body.__doc__}
        made = msgspec.defstruct(
            body.__name__, added, bases=(body,), module=body.__module__, namespace=namespace, kw_only=True
        )
        return made  # type: ignore[return-value]  # a subclass of the body

    return extended


def sampling_of(body: msgspec.Struct, dialect: Dialect) -> dict[str, Any]:
    """The sampling parameters that such a body gives, as `Options` has them; the others keep their defaults."""
    found = {}
    for each in fields(SamplingParams):
        named = {name: getattr(body, name) for name in dialect.spellings(each.name)}
        given = [name for name, value in named.items() if value is not None]
        if len(given) > 1:
            raise RequestError(400, given[0], f"is the same as {given[1]}: give one of them")
        if given:
            value = named[given[0]]
            found[each.name] = _WRITTEN[each.name].read(value) if each.name in _WRITTEN else value
    if found.get("top_p") == 0 and found.get("top_k", -1) >= -1:  # keeps the best token, as OpenAI's does
        found |= {"top_k": 1, "top_p": 1.0}
    return found


def _kind(parameter: "Field[Any]") -> Any:
    """The type of what is written for a parameter."""
    return _WRITTEN[parameter.name].type if parameter.name in _WRITTEN else parameter.type
