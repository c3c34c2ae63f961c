"""The draw of one token where logits are in the host's memory: the very token of the reference, with less work.

Top-k, top-p and min-p leave few tokens: only those are weighed exactly, in whole numbers, and ordered. What the others
weigh together is estimated in float32; where the estimate might decide otherwise than the exact sum, nothing is drawn
here, and the reference draws. Called by the sampler, on a CPU.
"""

import math

import numpy as np
import torch

from roost.layers.host_gumbel import Floats, Ids, winner
from roost.sampling.draw import WEIGHT_ONE

_BLOCK = 256  # tokens that are summed together
_ERROR = 3e-5  # of an estimated sum, at most: six times what the roundings of float32 add up to
_CANDIDATES_MAX = 4096  # tokens that are worth ordering here
# of the largest weight: the best tokens are looked for above these, in turn; what is below the last weighs nothing
_LEAST_OF_TOP_K = (1e-2, 1e-4, 1e-7, 1e-13)
_TEMPERATURE_LEAST = 1e-3  # below it float32 may not do
_LOGIT_MAX = 1e30  # the same from here on


class HostDraw:
    """Draws from one row of logits at a time; keeps room to work in."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._all_ids = np.arange(vocab_size, dtype=np.int32)
        self._room = np.zeros((-(-vocab_size // _BLOCK), _BLOCK), dtype=np.float32)  # the rest of it stays 0

    def draw(
        self, logits: Floats, key: int, *, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> int | None:
        """The token drawn from logits [vocab_size] under a key; None: not certain, the reference must say.

        `top_k` is vocab_size for all, `top_p` 1 for all, `min_p` 0 for all.
        """
        best = float(logits.max())
        if not abs(best) < _LOGIT_MAX or temperature < _TEMPERATURE_LEAST:  # NaN and infinities are the reference's
            return None
        if top_k == self._vocab_size and top_p == 1 and min_p == 0:
            return winner(logits, self._all_ids, key, best, temperature)
        kept = self._kept(logits, best, temperature, top_k, top_p, min_p)
        return None if kept is None else int(kept[winner(logits[kept], kept, key, best, temperature)])

    def _kept(
        self, logits: Floats, best: float, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> Ids | None:
        """What is left to draw from, by id; None: not certain."""
        if top_k < self._vocab_size:
            ids = _best(logits, best, temperature, top_k)
            return _kept(logits, ids, best, temperature, top_k, None, top_p, min_p)
        if top_p < 1:
            total = float(self._estimate(logits, best, temperature).sum(axis=1).sum(dtype=np.float64))
            # tokens lighter than this are together half of what top-p leaves out: none of them is kept
            ids = _above(logits, best, temperature, (1 - top_p) / 2 * total / self._vocab_size)
            return _kept(logits, ids, best, temperature, top_k, total, top_p, min_p)
        ids = _above(logits, best, temperature, 0.99 * min_p)
        return _kept(logits, ids, best, temperature, len(ids), None, top_p, min_p)

    def _estimate(self, logits: Floats, best: float, temperature: float) -> Floats:
        """What every token weighs, in units of the heaviest: [num_blocks, _BLOCK]."""
        room = self._room.reshape(-1)[: self._vocab_size]
        with np.errstate(over="ignore"):  # what is as small as that weighs nothing
            np.subtract(logits, np.float32(best), out=room)
            np.multiply(room, np.float32(1 / temperature), out=room)
        np.exp(room, out=room)
        return self._room


def _above(logits: Floats, best: float, temperature: float, least: float) -> Ids:
    """Ids of the tokens that weigh `least` of the heaviest or more."""
    return np.flatnonzero(logits >= np.float32(best + temperature * math.log(least))).astype(np.int32)


def _best(logits: Floats, best: float, temperature: float, top_k: int) -> Ids:
    """The `top_k` best tokens, by id, and maybe more; fewer, if all others weigh nothing."""
    for least in _LEAST_OF_TOP_K:
        ids = _above(logits, best, temperature, least)
        if len(ids) >= top_k:
            break
    return ids


def _kept(
    logits: Floats,
    ids: Ids,
    best: float,
    temperature: float,
    top_k: int,
    estimate: float | None,
    top_p: float,
    min_p: float,
) -> Ids | None:
    """Those that are kept of the best tokens, by id; `estimate` is what all tokens together weigh, if that counts.

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
    heavy = weights[kept] >= max(1.0, min_p * WEIGHT_ONE)
    return ids[kept[heavy]]
