"""Sampling parameters: what a request may say about the choice of each token, each parameter defined once.

A parameter is a field of `SamplingFields`: type, default, allowed values, help. The library's options, the fields of
HTTP bodies, the flags of the command line, the messages to the engine's process, the check of ranges and the numbers of
the sampler's rows follow from it; what the parameter does is the sampler's code. Never sees logits.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from roost.errors import RequestError
from roost.values import shown

TOP_K_MAX = 2**31 - 1
LOGIT_BIAS_ENTRIES_MAX = 1024
LOGIT_BIAS_MAX = 100.0
SEED_END = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """The interval that a parameter's values must lie in; NaN is in no interval."""

    low: float
    high: float
    what: str = "a finite number"
    is_open: bool = False  # `low` itself is not allowed
    besides: float | None = None  # one value outside the interval that is allowed, too

    def __str__(self) -> str:
        low, high = (f"{end:g}" if isinstance(end, float) else str(end) for end in (self.low, self.high))
        return f"{self.what} in {'(' if self.is_open else '['}{low}, {high}]"

    def check(self, param: str, value: float) -> None:
        """Raise RequestError for a value that is not allowed; it names the parameter and what is."""
        is_inside = self.low <= value <= self.high and not (self.is_open and value == self.low)
        if not is_inside and value != self.besides:
            raise RequestError(400, param, f"must be {self}, not {shown(value)}")


def parameter(
    default: Any, *, help: str, allowed: Allowed | None = None, flag: bool = True, metavar: str | None = None
) -> Any:
    """A field with all that is said of it; `flag`: whether the command line has a flag for it."""
    return field(default=default, metadata={"help": help, "allowed": allowed, "flag": flag, "metavar": metavar})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields:
    """The sampling parameters that all outputs of a request share; the defaults change nothing."""

    temperature: float = parameter(1.0, help="0 is greedy", allowed=Allowed(low=0, high=100))
    top_k: int = parameter(
        -1,
        help="only the best so many tokens; -1 is all",
        allowed=Allowed(low=1, high=TOP_K_MAX, besides=-1, what="-1 (all) or a whole number"),
    )
    top_p: float = parameter(
        1.0,
        help="only the best tokens that together have this probability",
        allowed=Allowed(low=0, high=1, is_open=True),
    )
    min_p: float = parameter(
        0.0,
        help="only tokens at least this probable, as a share of the best one's",
        allowed=Allowed(low=0, high=1),
    )
    repetition_penalty: float = parameter(
        1.0,
        help="of tokens that were said before; 1 is none",  # in prompt or output
        allowed=Allowed(low=0, high=10, is_open=True),
    )
    presence_penalty: float = parameter(
        0.0, help="of tokens that are in the output; 0 is none", allowed=Allowed(low=-2, high=2), flag=False
    )
    frequency_penalty: float = parameter(
        0.0,
        help="of tokens of the output, for each time they are in it; 0 is none",
        allowed=Allowed(low=-2, high=2),
        flag=False,
    )
    logit_bias: tuple[tuple[int, float], ...] = parameter(
        (), help="token ids, each with what is added to its logit: -100 to 100", flag=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(SamplingFields):
    """How the tokens of one output are chosen: this record travels from the request to the device."""

    seed: int = parameter(
        0,
        help="of its random numbers",
        allowed=Allowed(low=0, high=SEED_END - 1, what="a whole number"),
    )

    @classmethod
    def of(cls, given: SamplingFields, seed: int) -> "SamplingParams":
        """The parameters of one output of a request."""
        return cls(**{name: getattr(given, name) for name in _SHARED}, seed=seed)

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken, without a draw."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalises(self) -> bool:
        """Whether the choice depends on the tokens before it, beyond what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the model's own best token is taken: nothing changes the logits."""
        return self.greedy and not self.penalises and not self.logit_bias

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for the first value out of its range; it names the parameter and what is allowed."""
        for name, allowed in _RANGES:
            allowed.check(name, getattr(self, name))
        if self.logit_bias:
            self._check_bias(vocab_size)

    def _check_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > LOGIT_BIAS_ENTRIES_MAX:
            said = f"at most {LOGIT_BIAS_ENTRIES_MAX} entries, not {len(self.logit_bias)}"
            raise RequestError(400, "logit_bias", said)
        allowed_id = Allowed(low=0, high=vocab_size - 1, what="a token id")
        for token_id, bias in self.logit_bias:
            allowed_id.check("logit_bias", token_id)
            _BIAS.check("logit_bias", bias)
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError(400, "logit_bias", "at most one entry for each token id")


_BIAS = Allowed(low=-LOGIT_BIAS_MAX, high=LOGIT_BIAS_MAX)
_SHARED = tuple(each.name for each in fields(SamplingFields))
_RANGES: tuple[tuple[str, Allowed], ...] = tuple(
    (each.name, each.metadata["allowed"]) for each in fields(SamplingParams) if each.metadata["allowed"] is not None
)
