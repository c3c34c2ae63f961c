"""Which projections of few tokens kernels of our own take, and how they cut them; cuBLAS has the others.

Measured on an H200 in bfloat16 for the shapes of Llama-8B and SmolLM2-135M, in graphs of launches over copies of the
weights; docs/LOG.md has what was tried and not taken. Other shapes follow the nearest of those. Called by `kernels.ops`
for every projection of a step.
"""

from dataclasses import dataclass
from functools import cache

TOKENS_MAX = 64  # beyond, cuBLAS is faster
_SMALL = 2**23  # weights: of fewer, latencies count more than bytes
_SHORT = 1024  # inputs
_WHOLE_MAX = 8192  # inputs of rows that are read whole
_WIDE = 2**14  # outputs, of which there are enough for one program a tile
_NARROW = 4096  # outputs, of which there are too few for large tiles
_WARPS = 16 * 132  # as many of them as an H200 runs at a time, with the registers that rows take
_VECTOR = 8  # inputs that are read at once
_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the product of one token is cut: programs walk over tiles of rows of the weight."""

    block_n: int  # rows of a tile
    block_k: int  # inputs of an iteration; at least all of them: rows are read whole
    num_warps: int
    num_programs: int | None = None  # None: one a tile


@dataclass(frozen=True, slots=True)
class BlockTiling:
    """How the product of several tokens is cut: a program multiplies blocks with tensor cores."""

    block_m: int  # tokens
    block_n: int  # outputs
    block_k: int  # inputs of an iteration
    num_stages: int  # iterations whose inputs are on their way
    num_warps: int = 4
    uses_tma: bool = False  # blocks are brought by the tensor memory accelerator
    prefetch_lines: int = 0  # of each row of weights, asked for before the kernel in front has ended

    def shared_bytes(self, is_gated: bool) -> int:
        """Shared memory of a program, at most."""
        rows = self.block_m + self.block_n * (2 if is_gated else 1)
        return _ITEM_BYTES * self.num_stages * self.block_k * rows


Tiling = RowTiling | BlockTiling


@cache
def linear_tiling(
    num_tokens: int, out_len: int, in_len: int, *, is_gated: bool, has_tma: bool, shared_bytes: int
) -> Tiling | None:
    """The tiling of [num_tokens, in_len] times [out_len, in_len]; None: cuBLAS is faster, or it does not fit."""
    if not 0 < num_tokens <= TOKENS_MAX or in_len % _VECTOR:
        return None
    is_small = out_len * in_len <= _SMALL
    if num_tokens == 1:
        return _of_one_token(out_len, in_len, is_small, is_gated)
    if is_small:
        tiling = _of_small_weights(num_tokens, is_gated)
    elif num_tokens <= 16:
        tiling = _of_few_tokens(out_len, in_len, is_gated)
    else:
        tiling = _of_more_tokens(num_tokens, out_len, in_len, is_gated)
    if tiling is None or tiling.shared_bytes(is_gated) > shared_bytes or (tiling.uses_tma and not has_tma):
        return None
    return tiling


def _of_one_token(out_len: int, in_len: int, is_small: bool, is_gated: bool) -> RowTiling | None:
    if in_len > _WHOLE_MAX:
        return None if is_gated else RowTiling(8, 1024, 4)
    if in_len < _SHORT and not is_small and not is_gated:
        return RowTiling(8, 256, 4)
    block_k = max(_SHORT, 1 << (in_len - 1).bit_length())
    num_warps = max(2, block_k // 1024)
    if is_small:
        return RowTiling(4 if block_k <= 2 * _SHORT else 2, block_k, num_warps)
    return RowTiling(2, block_k, num_warps, None if out_len >= _WIDE else _WARPS // num_warps)


def _of_small_weights(num_tokens: int, is_gated: bool) -> BlockTiling | None:
    if num_tokens <= 16:
        return BlockTiling(16, 8 if is_gated else 16, 128, 5, num_warps=2, prefetch_lines=4)
    return BlockTiling(64 if is_gated and num_tokens > 32 else 32, 16, 64, 9, prefetch_lines=4)


def _of_few_tokens(out_len: int, in_len: int, is_gated: bool) -> BlockTiling | None:
    if in_len < _SHORT:
        return BlockTiling(16, 32, 64, 9, prefetch_lines=4)
    if is_gated:
        return BlockTiling(16, 32, 256, 4)
    return BlockTiling(16, 32, 256, 6) if out_len <= _NARROW else BlockTiling(16, 64, 128, 6)


def _of_more_tokens(num_tokens: int, out_len: int, in_len: int, is_gated: bool) -> BlockTiling | None:
    if in_len < _SHORT:
        return None
    if is_gated:
        return BlockTiling(32, 64, 128, 4) if num_tokens <= 32 else BlockTiling(64, 64, 128, 4, uses_tma=True)
    if out_len >= _WIDE:
        return BlockTiling(64, 128, 64, 4, uses_tma=True)
    if num_tokens <= 32:
        return None
    return (
        BlockTiling(64, 32, 128, 6, uses_tma=True) if out_len <= _NARROW else BlockTiling(64, 64, 128, 4, uses_tma=True)
    )
