"""Draws with Gumbel noise where tensors are in the host's memory: the tokens of `layers.gumbel`, one row at a time.

By the kernels in Numba where they run; without them, in torch. Which tokens a head's own distribution leaves out is
found among the few that weigh anything. Called by the sampler and, as `Ops`, by drafters.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.layers.gumbel import GOLDEN, MIX_1, MIX_2, SMALLEST_TEMPERATURE, WORD, RowDraws, noise, noise_table
from roost.numba_kernels.support import why_not

_BITS = 2**64 - 1
_LEAST = -20.0  # scaled logits below it weigh nothing beside the best, when drafts are cut by top-p

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drafts:
    """A row's next draft, before it is drawn."""

    logits: Floats  # with the row's bias
    key: int | None = None  # None: greedy
    cut: tuple[float, float, float] = (0.0, 1.0, -math.inf)  # best logit, temperature, least scaled logit


@cache
def _kernels() -> Any:
    """The kernels in Numba; None where they do not run."""
    return import_module("roost.numba_kernels.gumbel") if why_not() is None else None


def draw_key(seed: int, position: int) -> int:
    """The key of a seed and a position: that of `gumbel.draw_keys`, unsigned, in Python's own whole numbers."""
    state = _mixed((seed + GOLDEN) & _BITS)
    return _mixed((state + (position + 1) * GOLDEN) & _BITS)


def winner(logits: Floats, ids: Ids, key: int, best: float, temperature: float, least: float = -math.inf) -> int:
    """The place among logits [n] of tokens [n] whose score is largest, of scaled logits that are at least `least`.

    `best` is the logit that others are measured by: the largest, finite. Where there is no such token, 0.
    """
    kernels = _kernels()
    if kernels is None:
        return int(scores(logits, ids, key, best, temperature, least).argmax())
    return max(0, int(kernels.winner(*_arguments(logits, ids, key, best, temperature, least))))


def scores(logits: Floats, ids: Ids, key: int, best: float, temperature: float, least: float = -math.inf) -> Floats:
    """The scores of all; -inf where the scaled logit is below `least`."""
    kernels = _kernels()
    if kernels is not None:
        found = np.empty_like(logits)
        kernels.put_scores(found, *_arguments(logits, ids, key, best, temperature, least))
        return found
    with np.errstate(over="ignore"):  # what is as small as that weighs nothing
        scaled = (logits - np.float32(best)) / np.float32(max(temperature, SMALLEST_TEMPERATURE))
    signed = key - (1 << 64) if key >> 63 else key
    random = noise(torch.tensor([signed]), torch.from_numpy(ids))[0].numpy()
    return np.where(scaled >= np.float32(least), scaled + random, np.float32(-np.inf))


def draw(logits: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """`gumbel.draw`, row by row."""
    ids = _numbers(logits.shape[1])
    found = []
    for own, row, position in zip(logits.numpy(), rows.tolist(), positions.tolist(), strict=True):
        best = max(float(own.max()), float(np.finfo(np.float32).min))
        key = draw_key(int(draws.wholes[0, row]), position)
        found.append(winner(own, ids, key, best, float(draws.reals[0, row])))
    return torch.tensor(found, dtype=torch.int64)


def draft_scores(logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """`gumbel.draft_scores`, row by row."""
    found, ids = np.empty(logits.shape, dtype=np.float32), _narrow(token_ids)
    for number, drafts in enumerate(_drafts(logits, ids, rows, positions, draws)):
        found[number] = drafts.logits if drafts.key is None else scores(drafts.logits, ids, drafts.key, *drafts.cut)
    return torch.from_numpy(found)


def best_drafts(logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """`gumbel.best_drafts`, row by row."""
    ids = _narrow(token_ids)
    places = [
        int(drafts.logits.argmax()) if drafts.key is None else winner(drafts.logits, ids, drafts.key, *drafts.cut)
        for drafts in _drafts(logits, ids, rows, positions, draws)
    ]
    return torch.tensor(places, dtype=torch.int64)


def _drafts(logits: Tensor, ids: Ids, rows: Tensor, positions: Tensor, draws: RowDraws) -> Iterator[_Drafts]:
    """What each row's draft is drawn from."""
    columns = rows.tolist(), positions.tolist(), draws.reals[:, rows].T.tolist(), draws.wholes[:, rows].T.tolist()
    for given, row, position, reals, wholes in zip(logits.to(torch.float32).numpy(), *columns, strict=True):
        (temperature, top_p, min_p), (seed, top_k, num_biases) = reals, wholes
        own = given + _changes(draws, row, num_biases)[ids] if num_biases else given
        if not temperature:
            yield _Drafts(logits=own)
            continue
        best = max(float(own.max()), float(np.finfo(np.float32).min))
        least = math.log(min_p) if min_p else -math.inf
        if 0 < top_k < len(own) or top_p < 1:
            least = max(least, _least((own - best) / temperature, top_k, top_p))
        yield _Drafts(logits=own, key=draw_key(seed, position), cut=(best, temperature, least))


def _changes(draws: RowDraws, row: int, num_biases: int) -> Floats:
    """A row's bias of every token."""
    changes = np.zeros(draws.vocab_size, dtype=np.float32)
    np.add.at(changes, draws.bias_ids[row, :num_biases].numpy(), draws.biases[row, :num_biases].numpy())
    return changes


def _least(scaled: Floats, top_k: int, top_p: float) -> float:
    """The smallest scaled logit that top-k, and top-p of what it leaves, keep."""
    if 0 < top_k < len(scaled):
        ranked = np.partition(scaled, len(scaled) - top_k)[len(scaled) - top_k :]
    else:
        ranked = scaled[scaled > _LEAST]
    if top_p == 1 or not len(ranked):
        return float(ranked.min(initial=0.0))
    ranked = np.sort(ranked)[::-1]
    sums = np.exp(ranked).cumsum()
    return float(ranked[min(int(sums.searchsorted(sums[-1] * top_p)), len(ranked) - 1)])


def _arguments(logits: Floats, ids: Ids, key: int, best: float, temperature: float, least: float) -> tuple[object, ...]:
    words = np.uint32(key & WORD), np.uint32(key >> 32)
    divisor = np.float32(max(temperature, SMALLEST_TEMPERATURE))
    return logits, ids, *words, np.float32(best), divisor, np.float32(least), noise_table()


@cache
def _numbers(count: int) -> Ids:
    return np.arange(count, dtype=np.int32)


def _narrow(token_ids: Tensor) -> Ids:
    return token_ids.numpy().astype(np.int32)


def _mixed(state: int) -> int:
    """The finaliser of splitmix64."""
    state = ((state ^ (state >> 30)) * MIX_1) & _BITS
    state = ((state ^ (state >> 27)) * MIX_2) & _BITS
    return state ^ (state >> 31)
