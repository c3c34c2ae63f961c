"""Token masks in Triton: tokens whose bit is 0 get a logit of -inf, in place; nothing else is written.

A program has a piece of one node's logits: 32 of them share a word of the mask. The reference is
`layers.token_mask.mask_logits`. One of the `Ops` of models.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits of a program


def mask_logits(logits: Tensor, nodes: Tensor, masks: Tensor) -> None:
    """Forbid tokens at some `nodes` [n] of logits [num_nodes, vocab_size]: those whose bit in `masks` [n, w] is 0."""
    num_masks, vocab_size = len(nodes), logits.shape[1]
    assert masks.is_contiguous() and masks.shape == (num_masks, triton.cdiv(vocab_size, 32)) and logits.stride(1) == 1
    grid = num_masks, triton.cdiv(vocab_size, _BLOCK)
    _mask[grid](logits, nodes, masks, logits.stride(0), masks.stride(0), VOCAB_SIZE=vocab_size, BLOCK=_BLOCK)


@triton.jit
def _mask(logits, nodes, masks, logits_stride, masks_stride, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    node = tl.load(nodes + number)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < VOCAB_SIZE
    words = tl.load(masks + number * masks_stride + ids // 32, mask=is_token, other=-1)
    is_forbidden = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + node * logits_stride + ids, float("-inf"), mask=is_token & is_forbidden)
