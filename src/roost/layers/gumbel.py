"""Gumbel noise: one number for each (seed, position, token), and draws with it (Gumbel-max).

A token is drawn as the arg-max of (logit - best) / temperature + noise: no sums, so it depends neither on the batch nor
on how a device adds. The noise is whole-number arithmetic up to its last step, a hash and a table, and the score is
three roundings that every device makes alike. A draft head that draws with the same noise is right whenever its
distribution is the target's. Torch forms, the reference of `kernels.gumbel` and `numba_kernels.gumbel`. Called by the
sampler and by drafters.
"""

from dataclasses import dataclass
from functools import cache
from math import log, log1p

import numpy as np
import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
HASH_1 = 0x7FEB352D
HASH_2 = 0x846CA68B
WORD = 2**32 - 1

# Noise is looked up by the binary exponent of a uniform number's distance to the nearer end of (0, 1) and so many bits
# behind it, and goes on in a straight line for so many more; it is kept in units of 2**-SCALE_BITS.
BIN_BITS, LINE_BITS, SCALE_BITS = 7, 10, 20
SIDE_LEN = 32 << BIN_BITS  # entries of either end
EXPONENT_BIAS = 1023 << BIN_BITS  # of a float64, in entries
SMALLEST_TEMPERATURE = 2.0**-126  # as a float32, so that nothing is divided by 0
BIASES_MAX = 1024  # entries of a row's logit bias


@cache
def noise_table() -> np.ndarray:
    """[2, 2 * SIDE_LEN] int32: the noise at the start of each entry, and how much it changes to the next."""
    edges = np.array([[_noise_at(is_upper, place) for place in range(SIDE_LEN + 1)] for is_upper in (False, True)])
    whole = np.rint(edges * 2.0**SCALE_BITS).astype(np.int64)
    return np.stack([whole[:, :-1].reshape(-1), np.diff(whole, axis=1).reshape(-1)]).astype(np.int32)


def _noise_at(is_upper: bool, place: int) -> float:
    """The noise of a uniform number that is 2**exponent * (1 + fraction) units of 2**-33 from its end of (0, 1)."""
    exponent, part = divmod(place, 1 << BIN_BITS)
    distance = 2.0 ** (exponent - 33) * (1 + part / (1 << BIN_BITS))
    return -log(-log1p(-distance)) if is_upper else -log(-log(distance))


@cache
def table_on(device: torch.device) -> Tensor:
    """The same on a device."""
    return torch.from_numpy(noise_table()).to(device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowDraws:
    """How the tokens of every row are drawn, in tables on the device that never move; the last row is padding."""

    vocab_size: int
    reals: Tensor  # [3, num_rows] float32: temperature (0: greedy), top-p, min-p
    wholes: Tensor  # [3, num_rows] int64: seed, top-k, entries of the logit bias
    bias_ids: Tensor  # [num_rows, BIASES_MAX] int64
    biases: Tensor  # [num_rows, BIASES_MAX] float32; 0 past a row's entries

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> "RowDraws":
        """Tables of rows that are greedy."""
        return cls(
            vocab_size=vocab_size,
            reals=torch.zeros((3, num_rows), dtype=torch.float32, device=device),
            wholes=torch.zeros((3, num_rows), dtype=torch.int64, device=device),
            bias_ids=torch.zeros((num_rows, BIASES_MAX), dtype=torch.int64, device=device),
            biases=torch.zeros((num_rows, BIASES_MAX), dtype=torch.float32, device=device),
        )


def draw_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """64 random bits for each (seed, position), as int64: the same on every device."""
    state = _mixed(seeds.to(torch.int64) + _signed(GOLDEN))
    return _mixed(state + (positions.to(torch.int64) + 1) * _signed(GOLDEN))


def noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel noise [n, vocab] float32 of tokens [vocab] under the keys [n] of their draws."""
    keys = keys[:, None]
    bits = _hashed(_hashed(token_ids.to(torch.int64) ^ (keys & WORD)) + ((keys >> 32) & WORD) & WORD)
    is_upper = bits >> 31 == 1
    distance = 2 * torch.where(is_upper, WORD - bits, bits) + 1  # in units of 2**-33, from the nearer end
    parts = distance.to(torch.float64).view(torch.int64)
    place = (parts >> (52 - BIN_BITS)) - EXPONENT_BIAS + is_upper * SIDE_LEN
    along = (parts >> (52 - BIN_BITS - LINE_BITS)) & ((1 << LINE_BITS) - 1)
    values, changes = table_on(keys.device)
    whole = values[place] + ((changes[place] * along.to(torch.int32)) >> LINE_BITS)
    return whole.to(torch.float32) * 2.0**-SCALE_BITS


def draw(logits: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """The tokens [n] drawn from sane float32 logits [n, vocab] for `positions` [n] of `rows` [n]; equals: lowest ids.

    Tokens of logit -inf are never drawn; where there is no other, token 0.
    """
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    keys = draw_keys(draws.wholes[0][rows], positions)
    return (_scaled(logits, draws.reals[0][rows]) + noise(keys, token_ids)).argmax(dim=-1)


def draft_scores(logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """Scores [n, num_ids] float32 by which a head's tokens are taken: the largest first, as the target would draw them.

    `token_ids` [num_ids] are the target's ids of the head's. Greedy rows: the logits and their bias. Others: scaled by
    temperature, with the noise of the draw at `positions` [n], -inf where the head's own distribution leaves a token
    out under the row's top-k, top-p and min-p. Penalties are left to the target.
    """
    (temperature, top_p, min_p), (seeds, top_k, _) = draws.reals[:, rows], draws.wholes[:, rows]
    changes = logits.new_zeros((len(rows), draws.vocab_size), dtype=torch.float32)
    changes.scatter_add_(1, draws.bias_ids[rows], draws.biases[rows])
    logits = logits.to(torch.float32) + changes[:, token_ids]
    scaled = _scaled(logits, temperature)
    drawn = scaled + noise(draw_keys(seeds, positions), token_ids)
    scores = drawn.masked_fill(scaled < _least(scaled, top_k, top_p, min_p), -torch.inf)
    return torch.where(temperature[:, None] == 0, logits, scores)


def best_drafts(logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """The head's ids [n] of the largest of these scores: without rivals, they are not kept."""
    return draft_scores(logits, token_ids, rows, positions, draws).argmax(dim=-1)


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """(logit - best) / temperature: each is one rounding, which no device fuses with the next."""
    best = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)  # finite, if all is -inf too
    return (logits - best) / temperatures[:, None].to(torch.float32).clamp(min=SMALLEST_TEMPERATURE)


def _least(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest scaled logit [n, 1] that top-k, top-p of what it leaves, and min-p keep."""
    ranked = scaled.sort(dim=-1, descending=True).values
    number = torch.arange(ranked.shape[1], device=ranked.device)
    is_in = (number < top_k[:, None]) | (top_k[:, None] <= 0)
    shares = ranked.exp() * is_in
    before = shares.cumsum(dim=-1) - shares
    is_in &= (before < shares.sum(dim=-1, keepdim=True) * top_p[:, None]) | (top_p[:, None] == 1)
    last = is_in.sum(dim=-1, keepdim=True).clamp(min=1) - 1
    return torch.maximum(ranked.gather(1, last), min_p[:, None].log())


def _hashed(word: Tensor) -> Tensor:
    """A hash of 32 bits (xor-shift and multiply), in int64."""
    word = (word ^ (word >> 16)) * HASH_1 & WORD
    word = (word ^ (word >> 15)) * HASH_2 & WORD
    return word ^ (word >> 16)


def _mixed(state: Tensor) -> Tensor:
    """The finaliser of splitmix64, in wrapping int64 arithmetic."""
    state = (state ^ _shifted(state, 30)) * _signed(MIX_1)
    state = (state ^ _shifted(state, 27)) * _signed(MIX_2)
    return state ^ _shifted(state, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """A logical shift to the right: int64 has only the arithmetic one."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return value - (1 << 64) if value >> 63 else value
