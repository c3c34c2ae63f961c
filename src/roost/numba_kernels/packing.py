"""Weights as the products read them: 16 outputs are a group, and each four inputs of all 16 lie next to each other.

A group of blocks is all its values, then all its scales. Of 4 bits, a vector of 64 bytes has four inputs of each output
in its low halves and the next four in its high halves; of 8 bits it has four. Outputs are padded with zeros to whole
groups, inputs to whole blocks. Gate and up may be woven into each other, group by group. Called at load.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from roost.numba_kernels.simd import LANES
from roost.numba_kernels.tokens import BLOCK

_FOUR = 4  # inputs of an output that one lane holds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """A matrix ready for the products."""

    data: Tensor  # uint8, one group after the other
    kind: str  # Q4_0, Q4_1, Q8_0 or INT8
    out_len: int
    in_len: int
    is_gated: bool = False  # groups of gate and up take turns; out_len counts both


def _lanes(values: Tensor, fours: int) -> Tensor:
    """[out_padded, in_padded] to [num_groups, in_padded / 4, LANES, 4], as bytes lie in a group."""
    return values.view(-1, LANES, fours, _FOUR).transpose(1, 2)


def _padded(values: Tensor, fill: int = 0) -> Tensor:
    out_len, in_len = values.shape
    return pad(values, (0, -in_len % BLOCK, 0, -out_len % LANES), value=fill)


def _woven(groups: Tensor) -> Tensor:
    """Groups of gate and up, which follow one another, in turns."""
    return torch.stack(groups.chunk(2), dim=1).flatten(0, 1)


def pack_blocks(
    values: Tensor, scales: Tensor, minimums: Tensor | None, *, bits: int, offset: int, is_gated: bool
) -> PackedWeight:
    """GGUF's blocks: values [out_len, in_len] of 4 bits, or int8; float16 scales and minimums [out_len, num_blocks]."""
    out_len, in_len = values.shape
    kind = ("Q4_0" if minimums is None else "Q4_1") if bits == 4 else "Q8_0"
    if bits == 4:
        lanes = _lanes(_padded(values), -(-in_len // BLOCK) * BLOCK // _FOUR)
        cells = lanes[:, 0::2] | (lanes[:, 1::2] << 4)
    else:
        cells = _lanes(_padded(values), -(-in_len // BLOCK) * BLOCK // _FOUR).add(offset).to(torch.uint8)
    tables = [scales] if minimums is None else [scales, minimums]
    columns = [pad(each, (0, 0, 0, -out_len % LANES)).unflatten(0, (-1, LANES)).transpose(1, 2) for each in tables]
    floats = torch.stack(columns, dim=2).contiguous().view(torch.uint8)  # [num_groups, num_blocks, tables, LANES * 2]
    groups = torch.cat([cells.flatten(1), floats.flatten(1)], dim=1)
    return _made(groups, kind, out_len, in_len, is_gated)


def pack_int8(values: Tensor, scales: Tensor, *, offset: int, is_gated: bool) -> PackedWeight:
    """Values [out_len, in_len] int8 with a float32 scale for each output."""
    out_len, in_len = values.shape
    fours = -(-in_len // BLOCK) * BLOCK // _FOUR
    cells = _lanes(_padded(values.to(torch.int16)), fours).add(offset).to(torch.uint8)
    floats = pad(scales, (0, -out_len % LANES)).view(-1, LANES).contiguous().view(torch.uint8)
    return _made(torch.cat([cells.flatten(1), floats], dim=1), "INT8", out_len, in_len, is_gated)


def _made(groups: Tensor, kind: str, out_len: int, in_len: int, is_gated: bool) -> PackedWeight:
    if is_gated:
        assert out_len % (2 * LANES) == 0, out_len
        groups = _woven(groups)
    return PackedWeight(data=_aligned(groups.flatten()), kind=kind, out_len=out_len, in_len=in_len, is_gated=is_gated)


def _aligned(data: Tensor) -> Tensor:
    """A copy that begins at a cache line."""
    space = torch.empty(len(data) + 64, dtype=torch.uint8)
    first = -space.data_ptr() % 64
    aligned = space[first : first + len(data)]
    aligned.copy_(data)
    return aligned
