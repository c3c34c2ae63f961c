"""Logits that a soft cap holds between -cap and cap, in place.

y = cap * tanh(x / cap) = cap * (1 - 2 / (exp(2 x / cap) + 1)), in float32 and rounded once; where the exponent runs
over that is the cap. Reads and writes every logit once. The reference is `layers.soft_cap`. One of the `Ops` of models.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # logits of a program


def soft_cap(logits: Tensor, cap: float) -> None:
    """Hold logits [num_tokens, vocab_size] below a cap."""
    assert logits.stride(1) == 1
    num_tokens, vocab_size = logits.shape
    if num_tokens:
        grid = num_tokens, triton.cdiv(vocab_size, _BLOCK)
        _soft_cap[grid](logits, cap, logits.stride(0), VOCAB_SIZE=vocab_size, BLOCK=_BLOCK)


@triton.jit
def _soft_cap(logits, cap, token_stride, VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, is_token = logits + tl.program_id(0).to(tl.int64) * token_stride + ids, ids < VOCAB_SIZE
    logit = tl.load(place, mask=is_token, other=0.0).to(tl.float32)
    capped = cap * (1.0 - 2.0 / (tl.exp(2.0 * logit / cap) + 1.0))
    tl.store(place, capped.to(logits.dtype.element_ty), mask=is_token)
