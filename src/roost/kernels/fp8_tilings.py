"""How products by FP8 weights are cut, by how many tokens there are.

Measured on an H200 for the shapes of Llama-8B at 1, 8, 64 and 128 tokens (a graph of launches over copies of the
weights, without overlapped launches); other sizes follow the same rule. Called by `fp8_linear` for every product.
"""

from dataclasses import dataclass
from functools import cache

ROUNDED_FROM = 17  # tokens; fewer are multiplied as they are, which costs no more and is more exact
SCALED_MM_FROM = 65  # rounded tokens; torch._scaled_mm is faster from here on
_WIDE = 16384  # outputs that keep all multiprocessors busy with whole rows
_LONG = 2048  # inputs of which a split is worth its sum


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """How a product is cut into programs."""

    block_m: int  # tokens; 1: multiplied and summed without tensor cores
    block_n: int  # outputs
    block_k: int  # inputs of an iteration
    num_stages: int = 4
    num_warps: int = 4
    num_splits: int = 1  # of the inputs
    swapped: bool = False  # weights are the left factor, which tensor cores take from registers

    def stage_bytes(self, token_bytes: int) -> int:
        """Shared memory of one iteration: weights of a byte each, and tokens whose numbers have `token_bytes`."""
        return self.block_k * (self.block_n + self.block_m * token_bytes)


@cache
def fp8_tiling(num_tokens: int, out_len: int, in_len: int, *, columns: int, is_rounded: bool) -> Fp8Tiling:
    """How [num_tokens, in_len] times [out_len, in_len] is cut; `columns`: inputs that share a scale."""
    is_wide = out_len >= _WIDE
    splits = 1 if is_wide or in_len < _LONG else 2 if in_len < 4 * _LONG else 4
    if num_tokens == 1 and columns == in_len:
        return Fp8Tiling(1, 8, 1024, 3)
    if num_tokens <= 16:
        return Fp8Tiling(16, 32, _block_k(256, columns, in_len), num_splits=splits)
    block_m = 32 if num_tokens <= 32 else 64
    if is_rounded:
        block_n, block_k = (128, 128) if is_wide else (64, 256)
        return Fp8Tiling(block_m, block_n, _block_k(block_k, columns, in_len), swapped=True)
    if num_tokens <= 64:
        return Fp8Tiling(block_m, 64, _block_k(128, columns, in_len), num_splits=splits, swapped=True)
    return Fp8Tiling(128, 128, _block_k(128, columns, in_len), 3, 8, swapped=True)


def _block_k(block_k: int, columns: int, in_len: int) -> int:
    """The largest power of two, `block_k` at most, of which no block has two scales."""
    while columns != in_len and columns % block_k:
        block_k //= 2
    return block_k
