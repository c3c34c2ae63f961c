"""Draws with Gumbel noise in Triton: score = (logit - best) / temperature + noise(seed, position, token).

A target's row is cut into chunks, a program each, whose largest scores a second kernel compares, as for the arg-max:
reads [n, vocab_size] twice. A head's row is one program: its largest logit, the least that top-k, top-p and min-p keep
(bisected, to a thousandth of a nat), then the scores: reads [n, num_ids] two to 34 times, mostly from cache, writes it
once. Division is rounded as a CPU rounds it, and nothing is fused with it, so that a token does not depend on the
device. Everything about a row is read from tables by its number, so that a CUDA graph can hold it. One of the `Ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.kernels.argmax import argmax, pick
from roost.layers import gumbel
from roost.layers.gumbel import RowDraws

_CHUNK = 4096  # scores of a program, or of a turn of its loop
_NO_ID = tl.constexpr(2**31 - 1)
_WARPS = 8
_NUM_HALVINGS = tl.constexpr(16)  # of the interval that the least scaled logit lies in
_LOWEST = tl.constexpr(-64.0)  # scaled logits below it weigh nothing

_GOLDEN = tl.constexpr(gumbel.GOLDEN - 2**64)  # as int64
_MIX_1 = tl.constexpr(gumbel.MIX_1 - 2**64)
_MIX_2 = tl.constexpr(gumbel.MIX_2 - 2**64)
_HASH_1 = tl.constexpr(gumbel.HASH_1)
_HASH_2 = tl.constexpr(gumbel.HASH_2)
_WORD = tl.constexpr(gumbel.WORD)
_SIDE_LEN = tl.constexpr(gumbel.SIDE_LEN)
_BIAS = tl.constexpr(gumbel.EXPONENT_BIAS)
_BIN_SHIFT = tl.constexpr(52 - gumbel.BIN_BITS)  # of a float64's bits
_LINE_SHIFT = tl.constexpr(52 - gumbel.BIN_BITS - gumbel.LINE_BITS)
_LINE_BITS, _LINE_MASK = tl.constexpr(gumbel.LINE_BITS), tl.constexpr(2**gumbel.LINE_BITS - 1)
_SCALE = tl.constexpr(2.0**-gumbel.SCALE_BITS)
_SMALLEST = tl.constexpr(gumbel.SMALLEST_TEMPERATURE)
_FLOAT_MIN = tl.constexpr(torch.finfo(torch.float32).min)
BIASES_MAX = tl.constexpr(gumbel.BIASES_MAX)


def draw(logits: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """The tokens [n] drawn from sane float32 logits [n, vocab] for `positions` [n] of `rows` [n]."""
    number, vocab_size = logits.shape
    assert (
        logits.stride(1) == 1 and logits.dtype == torch.float32 and rows.is_contiguous() and positions.is_contiguous()
    )
    found = torch.empty(number, dtype=torch.int64, device=logits.device)
    if not number:
        return found
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    tops = torch.empty((number, num_chunks), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((number, num_chunks), dtype=torch.int32, device=logits.device)
    _scan[(number, num_chunks)](
        *(logits, logits.amax(dim=-1), rows, positions, draws.reals, draws.wholes, _table(logits.device)),
        *(tops, top_ids, logits.stride(0)),
        VOCAB_SIZE=vocab_size,
        CHUNK=_CHUNK,
        num_warps=_WARPS,
    )
    pick(tops, top_ids, found)
    return found


def draft_scores(logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """Scores [n, num_ids] float32 by which a head's tokens are taken, as `layers.gumbel` says."""
    number, num_ids = logits.shape
    assert logits.stride(1) == 1 and all(each.is_contiguous() for each in (token_ids, rows, positions))
    scores = torch.empty((number, num_ids), dtype=torch.float32, device=logits.device)
    if number:
        _score[(number,)](
            *(logits, token_ids, rows, positions, draws.reals, draws.wholes, draws.bias_ids, draws.biases),
            *(_table(logits.device), scores, logits.stride(0), draws.reals.shape[1]),
            NUM_IDS=num_ids,
            CHUNK=min(_CHUNK, triton.next_power_of_2(num_ids)),
            num_warps=_WARPS,
        )
    return scores


def best_drafts(logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, draws: RowDraws) -> Tensor:
    """The head's ids [n] of the largest of these scores."""
    return argmax(draft_scores(logits, token_ids, rows, positions, draws))


def _table(device: torch.device) -> Tensor:
    return gumbel.table_on(device)


@triton.jit
def _shifted(bits, COUNT: tl.constexpr, MASK: tl.constexpr):
    """A logical shift of int64 to the right."""
    return (bits >> COUNT) & MASK


@triton.jit
def _mixed(state):
    state = (state ^ _shifted(state, 30, 2**34 - 1)) * _MIX_1
    state = (state ^ _shifted(state, 27, 2**37 - 1)) * _MIX_2
    return state ^ _shifted(state, 31, 2**33 - 1)


@triton.jit
def _key(seed, position):
    """The 64 random bits of a draw."""
    return _mixed(_mixed(seed + _GOLDEN) + (position + 1) * _GOLDEN)


@triton.jit
def _hashed(word):
    """A hash of 32 bits, in int64: products wrap, and only their low words are kept."""
    word = ((word ^ (word >> 16)) * _HASH_1) & _WORD
    word = ((word ^ (word >> 15)) * _HASH_2) & _WORD
    return word ^ (word >> 16)


@triton.jit
def _noise(key, token_id, table):
    """The Gumbel noise of tokens in a draw."""
    word = _hashed(token_id.to(tl.int64) ^ (key & _WORD))
    word = _hashed((word + ((key >> 32) & _WORD)) & _WORD)
    is_upper = word >= 2**31
    distance = 2 * tl.where(is_upper, _WORD - word, word) + 1
    parts = distance.to(tl.float64).to(tl.int64, bitcast=True)
    place = (parts >> _BIN_SHIFT) - _BIAS + tl.where(is_upper, _SIDE_LEN, 0)
    along = ((parts >> _LINE_SHIFT) & _LINE_MASK).to(tl.int32)
    whole = tl.load(table + place) + ((tl.load(table + 2 * _SIDE_LEN + place) * along) >> _LINE_BITS)
    return whole.to(tl.float32) * _SCALE


@triton.jit
def _scaled(logit, best, temperature):
    """(logit - best) / temperature, each rounded as IEEE 754 says."""
    return tl.div_rn(logit - best, tl.zeros_like(logit) + tl.maximum(temperature, _SMALLEST))


@triton.jit
def _scan(
    logits,
    bests,
    rows,
    positions,
    reals,
    wholes,
    table,
    tops,
    top_ids,
    row_stride,
    VOCAB_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(rows + number)
    key = _key(tl.load(wholes + row), tl.load(positions + number))
    best = tl.maximum(tl.load(bests + number), _FLOAT_MIN)
    logit = tl.load(logits + number * row_stride + ids, mask=ids < VOCAB_SIZE, other=float("-inf"))
    score = _scaled(logit, best, tl.load(reals + row)) + _noise(key, ids, table)
    top = tl.max(score, 0)
    place = number * tl.num_programs(1) + chunk
    tl.store(tops + place, top)
    tl.store(top_ids + place, tl.min(tl.where((score == top) & (ids < VOCAB_SIZE), ids, _NO_ID), 0))


@triton.jit
def _biased(logits, token_ids, ids, bias_ids, biases, num_biases, NUM_IDS: tl.constexpr):
    """A chunk of a head's logits with the row's bias, and the target's ids of its tokens."""
    token_id = tl.load(token_ids + ids, mask=ids < NUM_IDS, other=-1)
    logit = tl.load(logits + ids, mask=ids < NUM_IDS, other=float("-inf")).to(tl.float32)
    for number in range(num_biases):
        logit += tl.where(token_id == tl.load(bias_ids + number), tl.load(biases + number), 0.0)
    return logit, token_id


@triton.jit
def _held(
    logits,
    token_ids,
    bias_ids,
    biases,
    num_biases,
    best,
    temperature,
    least,
    NUM_IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many scaled logits are at least `least`, and what they weigh together."""
    count, weight = 0, 0.0
    for first in range(0, NUM_IDS, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        logit, _ = _biased(logits, token_ids, ids, bias_ids, biases, num_biases, NUM_IDS)
        scaled = (logit - best) / temperature
        count += tl.sum((scaled >= least).to(tl.int32), 0)
        weight += tl.sum(tl.where(scaled >= least, tl.exp(scaled), 0.0), 0)
    return count, weight


@triton.jit
def _score(
    logits, token_ids, rows, positions, reals, wholes, bias_ids, biases, table, scores, row_stride, num_rows,
    NUM_IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    logits += number * row_stride
    scores += number * NUM_IDS
    temperature, top_p, min_p = (
        tl.load(reals + row),
        tl.load(reals + num_rows + row),
        tl.load(reals + 2 * num_rows + row),
    )
    top_k, num_biases = tl.load(wholes + num_rows + row), tl.load(wholes + 2 * num_rows + row).to(tl.int32)
    bias_ids += row * BIASES_MAX
    biases += row * BIASES_MAX
    best = _FLOAT_MIN
    if temperature > 0:
        for first in range(0, NUM_IDS, CHUNK):
            logit, _ = _biased(logits, token_ids, first + tl.arange(0, CHUNK), bias_ids, biases, num_biases, NUM_IDS)
            best = tl.maximum(best, tl.max(logit, 0))
    least = tl.where(min_p > 0, tl.log(tl.maximum(min_p, 1e-30)), float("-inf"))
    if (temperature > 0) & (((top_k > 0) & (top_k < NUM_IDS)) | (top_p < 1)):
        low, high, kept = _LOWEST, 0.0, _LOWEST  # at least top_k of them are above `low`
        if (top_k > 0) & (top_k < NUM_IDS):
            for _ in range(_NUM_HALVINGS):
                middle = (low + high) / 2
                count, _weight = _held(
                    logits, token_ids, bias_ids, biases, num_biases, best, temperature, middle, NUM_IDS, CHUNK
                )
                low, high = tl.where(count >= top_k, middle, low), tl.where(count >= top_k, high, middle)
            kept = low
        if top_p < 1:
            _count, total = _held(
                logits, token_ids, bias_ids, biases, num_biases, best, temperature, kept, NUM_IDS, CHUNK
            )
            low, high = kept, 0.0
            for _ in range(_NUM_HALVINGS):
                middle = (low + high) / 2
                _count, weight = _held(
                    logits, token_ids, bias_ids, biases, num_biases, best, temperature, middle, NUM_IDS, CHUNK
                )
                low, high = (
                    tl.where(weight >= top_p * total, middle, low),
                    tl.where(weight >= top_p * total, high, middle),
                )
        least = tl.maximum(least, low)
    key = _key(tl.load(wholes + row), tl.load(positions + number))
    for first in range(0, NUM_IDS, CHUNK):
        ids = first + tl.arange(0, CHUNK)
        score, token_id = _biased(logits, token_ids, ids, bias_ids, biases, num_biases, NUM_IDS)
        if temperature > 0:
            scaled = _scaled(score, best, temperature)
            score = tl.where(scaled >= least, scaled + _noise(key, token_id, table), float("-inf"))
        tl.store(scores + ids, score, mask=ids < NUM_IDS)
