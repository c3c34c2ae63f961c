"""The draw of one token where logits are in the host's memory: the very token of `sampling.draw`, with less work.

Top-k, top-p and min-p leave few tokens: only those are weighed exactly, in whole numbers, and ordered. What the others
weigh together is estimated in float32; where the estimate might decide otherwise than the exact sum, nothing is drawn
here, and the reference draws. The same for a draw from the whole vocabulary: a number that falls near the edge of its
token is the reference's to place. Called by the sampler, on a CPU.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from roost.sampling.draw import GOLDEN, MIX_1, MIX_2, WEIGHT_ONE

_BLOCK = 256  # tokens that are summed together
_ERROR = 3e-5  # of an estimated sum, at most: six times what the roundings of float32 add up to
_CANDIDATES_MAX = 4096  # tokens that are worth ordering here
# of the largest weight: the best tokens are looked for above these, in turn; what is below the last weighs nothing
_LEAST_OF_TOP_K = (1e-2, 1e-4, 1e-7, 1e-13)
_TEMPERATURE_LEAST = 1e-3  # below it float32 may not do
_LOGIT_MAX = 1e30  # the same from here on
_BITS = 2**64 - 1

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class HostDraw:
    """Draws from one row of logits at a time; keeps room to work in."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._room = np.zeros((-(-vocab_size // _BLOCK), _BLOCK), dtype=np.float32)  # the rest of it stays 0

    def draw(
        self, logits: Floats, uniform: float, *, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int | None:
        """The token [vocab_size] on which a number in [0, 1) falls; None: not certain, the reference must say.

        `top_k` is vocab_size for all, `top_p` 1 for all, `min_p` 0 for all.
        """
        best = float(logits.max())
        if not abs(best) < _LOGIT_MAX or temperature < _TEMPERATURE_LEAST:  # NaN and infinities are the reference's
            return None
        if top_k < self._vocab_size:
            ids = _best(logits, best, temperature, top_k)
            return _drawn(logits, ids, best, temperature, uniform, top_k, None, top_p, min_p)
        if top_p < 1:
            total = float(self._estimate(logits, best, temperature).sum(axis=1).sum(dtype=np.float64))
            # tokens lighter than this are together half of what top-p leaves out: none of them is kept
            ids = _above(logits, best, temperature, (1 - top_p) / 2 * total / self._vocab_size)
            return _drawn(logits, ids, best, temperature, uniform, top_k, total, top_p, min_p)
        if min_p > 0:
            ids = _above(logits, best, temperature, 0.99 * min_p)
            return _drawn(logits, ids, best, temperature, uniform, len(ids), None, top_p, min_p)
        return self._from_all(logits, best, temperature, uniform)

    def _estimate(self, logits: Floats, best: float, temperature: float) -> Floats:
        """What every token weighs, in units of the heaviest: [num_blocks, _BLOCK]."""
        room = self._room.reshape(-1)[: self._vocab_size]
        with np.errstate(over="ignore"):  # what is as small as that weighs nothing
            np.subtract(logits, np.float32(best), out=room)
            np.multiply(room, np.float32(1 / temperature), out=room)
        np.exp(room, out=room)
        return self._room

    def _from_all(self, logits: Floats, best: float, temperature: float, uniform: float) -> int | None:
        """A draw that nothing truncates: the token is certain unless the number is near its edge."""
        weights = self._estimate(logits, best, temperature)
        ends = weights.sum(axis=1).cumsum(dtype=np.float64)
        at, error = uniform * ends[-1], _ERROR * ends[-1]
        block = int(ends.searchsorted(at, side="right"))
        if block == len(ends):
            return None
        before = ends[block - 1] if block else 0.0
        inner = before + weights[block].cumsum(dtype=np.float64)
        place = int(inner.searchsorted(at, side="right"))
        if place == _BLOCK or at - (inner[place - 1] if place else before) < error or inner[place] - at < error:
            return None
        return block * _BLOCK + place


def uniform(seed: int, position: int) -> float:
    """The number of a seed and a position: that of `draw.uniform`, in Python's own whole numbers."""
    state = _mixed((seed + GOLDEN) & _BITS)
    return (_mixed((state + (position + 1) * GOLDEN) & _BITS) >> 11) * 2.0**-53


def _mixed(state: int) -> int:
    """The finaliser of splitmix64."""
    state = ((state ^ (state >> 30)) * MIX_1) & _BITS
    state = ((state ^ (state >> 27)) * MIX_2) & _BITS
    return state ^ (state >> 31)


def _above(logits: Floats, best: float, temperature: float, least: float) -> Ids:
    """Ids of the tokens that weigh `least` of the heaviest or more."""
    return np.flatnonzero(logits >= np.float32(best + temperature * math.log(least)))


def _best(logits: Floats, best: float, temperature: float, top_k: int) -> Ids:
    """The `top_k` best tokens, by id, and maybe more; fewer, if all others weigh nothing."""
    for least in _LEAST_OF_TOP_K:
        ids = _above(logits, best, temperature, least)
        if len(ids) >= top_k:
            break
    return ids


def _drawn(
    logits: Floats,
    ids: Ids,
    best: float,
    temperature: float,
    uniform: float,
    top_k: int,
    estimate: float | None,
    top_p: float,
    min_p: float,
) -> int | None:
    """A token of those that are kept of the best tokens, by id; `estimate` is what all together weigh, if that counts.

    Without it, top-p is of the `top_k` best.
    """
    if len(ids) > _CANDIDATES_MAX:
        return None
    own = logits[ids]
    exponents = (own.astype(np.float64) - best) / temperature
    weights = np.rint(torch.from_numpy(exponents).exp_().numpy() * WEIGHT_ONE).astype(np.int64)  # as the reference does
    order = np.argsort(-own, kind="stable")[:top_k]  # best first, then lowest ids
    ranked = weights[order]
    sums = ranked.cumsum()
    before = (sums - ranked).astype(np.float64)
    if estimate is None:
        num_kept = int(before.searchsorted(float(sums[-1]) * top_p))
    else:
        wanted = estimate * WEIGHT_ONE * top_p
        num_kept = int(before.searchsorted(wanted * (1 - _ERROR)))
        if num_kept == len(before) or num_kept != int(before.searchsorted(wanted * (1 + _ERROR))):
            return None
    kept = np.sort(order[: max(1, num_kept)])
    weights = weights[kept]
    ends = np.where(weights >= min_p * WEIGHT_ONE, weights, 0).cumsum()
    total = int(ends[-1])
    target = min(int(uniform * float(total)), total - 1)
    return int(ids[kept[ends.searchsorted(target, side="right")]])
