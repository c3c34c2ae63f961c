"""The sampler's promises in plain Python and numpy, one token at a time: slow, and independent of the real one."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from roost.device.cpu import CpuDevice
from roost.sampling.params import SamplingParams
from roost.sampling.sampler import Sampler
from roost.step import RowSetup

Logits = NDArray[np.float32]
MASK, WORD = 2**64 - 1, 2**32 - 1
MARGIN = 1e-7  # closer than this to a border, rounding may decide
NOISE_MARGIN = 1e-4  # the same of two scores: noise is taken from a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row at the moment of a choice."""

    sampling: SamplingParams
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    min_len: int = 0
    stop_ids: tuple[int, ...] = ()

    def setup(self, row: int) -> RowSetup:
        """What the device is told when the row begins."""
        tokens = self.prompt + self.output if self.sampling.penalises else ()
        return RowSetup(
            row=row,
            sampling=self.sampling,
            prompt_len=len(self.prompt),
            min_len=self.min_len,
            stop_ids=self.stop_ids,
            tokens=np.array(tokens, dtype=np.int32),
        )


def mixed(state: int) -> int:
    """The finaliser of splitmix64, in Python's own whole numbers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def hashed(word: int) -> int:
    """A hash of 32 bits."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & WORD
    return word ^ (word >> 16)


def draw_key(seed: int, position: int) -> int:
    """The random bits of a seed and a position."""
    golden = 0x9E3779B97F4A7C15
    state = mixed((seed + golden) & MASK)
    return mixed((state + (position + 1) * golden) & MASK)


def uniform(key: int, token: int) -> float:
    """The number in (0, 1) of a token in a draw."""
    return (hashed((hashed(token ^ (key & WORD)) + (key >> 32)) & WORD) + 0.5) * 2.0**-32


def gumbel(key: int, token: int) -> float:
    """The noise of a token in a draw."""
    return -math.log(-math.log(uniform(key, token)))


def changed_logits(case: Case, logits: Logits, position: int, path: Sequence[int] = ()) -> Logits:
    """Logits after bias, penalties and held stop ids."""
    sampling, changed = case.sampling, logits.astype(np.float32).copy()
    one = np.float32
    for token, bias in sampling.logit_bias:
        changed[token] += one(bias)
    counts = Counter([*case.output, *path])
    for token in set(case.prompt) | set(counts):
        penalty = one(sampling.repetition_penalty)
        changed[token] = changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
    for token, count in counts.items():
        changed[token] = changed[token] - one(sampling.frequency_penalty) * one(count)
        changed[token] = changed[token] - one(sampling.presence_penalty)
    if position < case.min_len:
        for token in case.stop_ids:
            changed[token] = -np.inf
    return changed


def ranked(changed: Logits) -> list[int]:
    """Ids, best logit first, ties lowest id first."""
    return sorted(range(len(changed)), key=lambda token: (-changed[token], token))


def distribution(sampling: SamplingParams, changed: Logits) -> tuple[dict[int, float], bool]:
    """Probability of each kept token in id order, and whether a border was too close to be sure of it."""
    order = ranked(changed)
    order = order[: sampling.top_k] if sampling.top_k > 0 else order
    best = float(changed[order[0]])
    weights = {token: math.exp((float(changed[token]) - best) / sampling.temperature) for token in order}
    total, held, kept, unsure = sum(weights.values()), 0.0, [], False
    for token in order:
        if sampling.top_p < 1:
            unsure = unsure or abs(held / total - sampling.top_p) < MARGIN
            if held / total >= sampling.top_p:
                break
        kept.append(token)
        held += weights[token]
    unsure = unsure or any(abs(weights[token] - sampling.min_p) < MARGIN for token in kept if sampling.min_p)
    kept = sorted(token for token in kept if weights[token] >= sampling.min_p)
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}, unsure


def choice(case: Case, logits: Logits, position: int, path: Sequence[int] = ()) -> int | None:
    """The token, or None where rounding may decide."""
    changed = changed_logits(case, logits, position, path)
    if case.sampling.greedy:
        return ranked(changed)[0]
    kept, unsure = distribution(case.sampling, changed)
    if unsure:
        return None
    key, temperature = draw_key(case.sampling.seed, position), case.sampling.temperature
    scores = {token: float(changed[token]) / temperature + gumbel(key, token) for token in kept}
    first, *others = sorted(scores, key=lambda token: -scores[token])
    near = NOISE_MARGIN * max(1.0, abs(scores[first]) * 1e-3)
    return None if others and scores[first] - scores[others[0]] < near else first


def sampler_of(cases: Sequence[Case], vocab_size: int) -> Sampler:
    """A sampler whose row i is case i."""
    sampler = Sampler(len(cases), vocab_size, CpuDevice())
    for row, case in enumerate(cases):
        sampler.set_row(case.setup(row))
    return sampler


def sampled(
    sampler: Sampler,
    logits: Logits,
    rows: Sequence[int],
    positions: Sequence[int],
    paths: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Tokens of the real sampler."""
    extra = None if paths is None else torch.tensor(paths)
    where = torch.tensor(positions)
    return sampler.sample(torch.from_numpy(logits), torch.tensor(rows), rows, where, extra).tolist()
