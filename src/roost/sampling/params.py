"""Sampling: what a request asks of the choice of each token, and which values are allowed.

Owns the options and their ranges; the same record travels from the request to the device. Never sees scores.
Built by whoever takes requests in; read by sched and, through the seam, by the sampler.
"""

from dataclasses import dataclass

from roost.errors import RequestError
from roost.values import shown

TOP_K_MAX = 2**31 - 1
LOGIT_BIAS_ENTRIES_MAX = 1024
LOGIT_BIAS_MAX = 100.0
SEED_END = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; the defaults change nothing."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = -1  # -1: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its score)
    seed: int = 0

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
        """Whether the model's own best token is taken: nothing changes the scores."""
        return self.greedy and not self.penalises and not self.logit_bias

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for the first value out of its range; it names the parameter and what is allowed."""
        _check_real("temperature", self.temperature, 0, 100)
        if self.top_k != -1:
            _check_whole("top_k", self.top_k, 1, TOP_K_MAX, what="-1 (all) or a whole number")
        _check_real("top_p", self.top_p, 0, 1, open_below=True)
        _check_real("min_p", self.min_p, 0, 1)
        _check_real("repetition_penalty", self.repetition_penalty, 0, 10, open_below=True)
        _check_real("presence_penalty", self.presence_penalty, -2, 2)
        _check_real("frequency_penalty", self.frequency_penalty, -2, 2)
        self._check_bias(vocab_size)
        _check_whole("seed", self.seed, 0, SEED_END - 1)

    def _check_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > LOGIT_BIAS_ENTRIES_MAX:
            raise _refusal("logit_bias", f"at most {LOGIT_BIAS_ENTRIES_MAX} entries, not {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            _check_whole("logit_bias", token_id, 0, vocab_size - 1, what="a token id")
            _check_real("logit_bias", bias, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise _refusal("logit_bias", "at most one entry for each token id")


def _check_real(param: str, value: float, low: float, high: float, *, open_below: bool = False) -> None:
    """Refuse what is not in [low, high], or in (low, high]; NaN is in no interval."""
    if not low <= value <= high or (open_below and value == low):
        bracket = "(" if open_below else "["
        raise _refusal(param, f"must be a finite number in {bracket}{low:g}, {high:g}], not {shown(value)}")


def _check_whole(param: str, value: int, low: int, high: int, *, what: str = "a whole number") -> None:
    """Refuse what is not in [low, high]."""
    if not low <= value <= high:
        raise _refusal(param, f"must be {what} in [{low}, {high}], not {shown(value)}")


def _refusal(param: str, message: str) -> RequestError:
    return RequestError(400, param, message)
