"""Batch invariance on a CPU: shapes to pad to, so that a token's result has the same bits in every batch.

A matrix product adds up in an order that its shape decides: one row is a dot product, the last rows of a tile have a
kernel of their own, a long sum is cut into pieces by its length. So rows and keys are padded to shapes that give the
same bits. Libraries and processors differ, so these shapes are found by trying them, once. Called by attention and by
linear layers.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

KEY_BLOCK = 512  # keys that torch's attention on a CPU sums at a time
KEY_STEP = 64  # the last block is cut to a multiple of it, where that gives the same bits
_ROWS = (1, 2, 4, 8, 16, 32)  # what rows may have to be padded to a multiple of
_LENS_TRIED = (1, 22, 43, 64)  # keys in the last step of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPadding:
    """Shapes of attention that give the same bits."""

    rows: int  # queries are padded to a multiple of it
    tails: tuple[int, ...]  # keys of the last block: ascending, the last one is a whole block
    is_exact: bool  # False: no shape does on this machine, and the last bits depend on the batch

    def keys_for(self, num_keys: int) -> int:
        """Keys that a row of `num_keys` is padded to."""
        blocks, rest = divmod(num_keys, KEY_BLOCK)
        return blocks * KEY_BLOCK + next(tail for tail in (0, *self.tails) if tail >= rest)


def padded_rows(num_rows: int, multiple: int) -> int:
    """Rows that a product of `num_rows` is padded to."""
    return -(-num_rows // multiple) * multiple


@cache
def attention_padding(head_dim: int) -> AttentionPadding:
    """Shapes for which attention over a few queries gives the bits of attention over many."""
    for rows in _ROWS:
        tails = tuple(tail for tail in range(KEY_STEP, KEY_BLOCK + 1, KEY_STEP) if _agrees(head_dim, rows, tail))
        if tails and tails[-1] == KEY_BLOCK:
            return AttentionPadding(rows=rows, tails=tails, is_exact=True)
    every = tuple(range(KEY_STEP, KEY_BLOCK + 1, KEY_STEP))
    return AttentionPadding(rows=1, tails=every, is_exact=False)


@cache
def row_multiple(num_threads: int) -> int | None:
    """The multiple that rows of a projection are padded to, for the same bits whatever their number; None: none does.

    Threads share the rows, so it may depend on `num_threads`, which must be the number that torch has now.
    """
    assert num_threads == torch.get_num_threads()
    rows, weight = _noise(256, 192), _noise(96, 192)
    many = linear(rows, weight)
    for multiple in _ROWS:
        counts = [*range(multiple, 65, multiple), *(padded_rows(number, multiple) for number in (100, 130, 200))]
        if all(torch.equal(linear(rows[3 : 3 + number], weight), many[3 : 3 + number]) for number in counts):
            return multiple
    return None


def _agrees(head_dim: int, rows: int, tail: int) -> bool:
    """Whether `rows` queries over a last block of `tail` keys give the bits of many over a whole one."""
    key, value, query = (_noise(1, 2, length, head_dim) for length in (2 * KEY_BLOCK, 2 * KEY_BLOCK, 256))
    lens = [KEY_BLOCK + tail - KEY_STEP + more for more in _LENS_TRIED]
    seen = torch.tensor(lens)[torch.arange(query.shape[2]) % len(lens)]
    mask = torch.zeros(len(seen), key.shape[2]).masked_fill_(torch.arange(key.shape[2]) >= seen[:, None], -torch.inf)
    many = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    for number in range(len(lens)):
        few, end = query[:, :, number : number + 1].expand(-1, -1, rows, -1).contiguous(), KEY_BLOCK + tail
        own = mask[number, :end].expand(1, 1, rows, -1)
        found = scaled_dot_product_attention(few, key[:, :, :end], value[:, :, :end], attn_mask=own)
        if not all(torch.equal(row, many[:, :, number]) for row in found.unbind(2)):
            return False
    return True


def _noise(*shape: int) -> Tensor:
    """Numbers whose sums round, the same in every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
