"""The id of a row's largest logit: the lowest among equals, never that of a NaN, never one past the vocabulary.

A row is cut into chunks, a program each, that find their largest logit and its id; a second kernel picks among a row's
chunks. A row of nothing but NaN gives 0. Reads [num_rows, vocab_size] once; the chunks' findings are 8 bytes each. The
reference is torch.argmax of logits without NaN. One of the `Ops` of models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096  # scores of a program
_NO_ID = tl.constexpr(2**31 - 1)


def argmax(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Ids [num_rows] int64 of the largest of [num_rows, vocab_size]."""
    num_rows, vocab_size = logits.shape
    assert vocab_size > 0 and logits.stride(1) == 1
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device) if out is None else out
    assert ids.is_contiguous() and ids.dtype == torch.int64
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    tops = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    top_ids = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    if num_rows:
        _scan[(num_rows, num_chunks)](
            *(logits, tops, top_ids, logits.stride(0)), VOCAB_SIZE=vocab_size, CHUNK=_CHUNK, num_warps=4
        )
        pick(tops, top_ids, ids)
    return ids


def pick(tops: Tensor, top_ids: Tensor, out: Tensor) -> None:
    """Write the id [num_rows] of the largest of each row's chunks [num_rows, num_chunks]; the lowest among equals."""
    num_rows, num_chunks = tops.shape
    block = triton.next_power_of_2(num_chunks)
    _pick[(num_rows,)](tops, top_ids, out, NUM_CHUNKS=num_chunks, BLOCK=block, num_warps=1)


@triton.jit
def _scan(logits, tops, top_ids, row_stride, VOCAB_SIZE: tl.constexpr, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(logits + row * row_stride + ids, mask=ids < VOCAB_SIZE, other=float("nan")).to(tl.float32)
    is_score = score == score  # noqa: PLR0124 - false for NaN, and so past the vocabulary
    score = tl.where(is_score, score, float("-inf"))
    top = tl.max(score, 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(tops + place, top)
    tl.store(top_ids + place, tl.min(tl.where(is_score & (score == top), ids, _NO_ID), 0))


@triton.jit
def _pick(tops, top_ids, ids, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_in = chunk < NUM_CHUNKS
    each = tl.load(tops + row * NUM_CHUNKS + chunk, mask=is_in, other=float("-inf"))
    each_id = tl.load(top_ids + row * NUM_CHUNKS + chunk, mask=is_in, other=_NO_ID)
    best = tl.min(tl.where(each == tl.max(each, 0), each_id, _NO_ID), 0)
    tl.store(ids + row, tl.where(best == _NO_ID, 0, best).to(tl.int64))
