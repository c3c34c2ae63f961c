"""Matrices of 4-bit or 8-bit whole numbers in groups: 32 or more inputs of an output share a scale.

A weight is (value - zero) * scale, or value * scale + minimum as GGUF's Q4_1 has it; values have no sign, and scale,
zero and minimum belong to one output and one group of its inputs. `PackedMatrix` lies as the kernel reads it: a block
of inputs is one slice of 32 for each field of a 16-bit word, and field j of the block's word w is input 32 j + w, so
that a shift gives a slice whole. Torch alone; the reference of `kernels.grouped_linear`. Called by forms of weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from roost.errors import ConfigError

SLICE_LEN = 32  # inputs that one field of a block's words stands for
OUT_MULTIPLE = 128  # outputs are padded to a multiple of it, so that the kernel's tiles are whole
ZERO_BASE = 128  # in bfloat16 a value of 4 bits becomes 128 + value by writing it behind the bits of 128.0
_WORD_BITS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedMatrix:
    """A matrix as checkpoints state it, one number to an entry."""

    values: Tensor  # [out_len, in_len] uint8
    scales: Tensor  # [out_len, num_groups] bfloat16 or float16
    zeros: Tensor | None = None  # [out_len, num_groups] uint8, of 4 bits; None: half the range, as symmetric formats
    minimums: Tensor | None = None  # [out_len, num_groups], instead of zeros
    bits: int = 4

    def __post_init__(self) -> None:
        out_len, in_len = self.values.shape
        for table in (self.scales, self.zeros, self.minimums):
            assert table is None or table.shape == self.scales.shape, (table.shape, self.scales.shape)
        assert self.scales.shape[0] == out_len and in_len % self.scales.shape[1] == 0, self.scales.shape
        assert self.zeros is None or (self.minimums is None and self.bits == 4)

    @property
    def group_len(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantise(self) -> Tensor:
        """The weights as float32 [out_len, in_len]."""
        groups = self.values.view(*self.scales.shape, -1).to(torch.float32)
        scales = self.scales.to(torch.float32)[..., None]
        if self.minimums is not None:
            return (groups * scales + self.minimums.to(torch.float32)[..., None]).flatten(1)
        zeros = 2 ** (self.bits - 1) if self.zeros is None else self.zeros.to(torch.float32)[..., None]
        return ((groups - zeros) * scales).flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedMatrix:
    """The same as the kernel reads it; outputs are padded to `OUT_MULTIPLE`, inputs to whole blocks."""

    words: Tensor  # [num_blocks, out_padded, SLICE_LEN] int16
    # [num_groups, out_padded] int32: the scale in the low half; in the high half the minimum, of the same type, or
    # -ZERO_BASE - zero as bfloat16, which a kernel adds to ZERO_BASE + value. One load gives both.
    tables: Tensor
    scale_dtype: torch.dtype
    has_minimums: bool
    bits: int
    group_len: int  # all padded inputs where an output has one scale
    out_len: int
    in_len: int

    @property
    def block_len(self) -> int:
        """Inputs of a block."""
        return block_len(self.bits)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product by it reads."""
        return self.words.nbytes + self.tables.nbytes


def block_len(bits: int) -> int:
    """Inputs of a block of words."""
    return _WORD_BITS // bits * SLICE_LEN


def can_group(group_len: int, in_len: int, bits: int) -> bool:
    """Whether a packed matrix can have such groups: no slice may cross a group's end, nor a group a block's."""
    block = block_len(bits)
    is_aligned = group_len % SLICE_LEN == 0 and (block % group_len == 0 or group_len % block == 0)
    return group_len == in_len or (is_aligned and in_len % group_len == 0)


def check_groups(matrix: GroupedMatrix) -> None:
    """Refuse groups that a packed matrix cannot have."""
    group_len, in_len = matrix.group_len, matrix.values.shape[1]
    if not can_group(group_len, in_len, matrix.bits):
        raise ConfigError(
            f"groups of {group_len} of {in_len} inputs are not supported; supported are groups of {SLICE_LEN}, "
            f"{2 * SLICE_LEN} and multiples of {4 * SLICE_LEN} inputs, and one scale for each output"
        )


def concatenate(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix | None:
    """One matrix of several along the outputs; None where their groups or their kinds differ."""
    first = matrices[0]
    sizes = {(each.values.shape[1], each.scales.shape[1]) for each in matrices}
    kinds = {(each.bits, each.scales.dtype, each.minimums is None) for each in matrices}
    if len(sizes) > 1 or len(kinds) > 1:
        return None
    has_zeros = any(each.zeros is not None for each in matrices)
    return GroupedMatrix(
        values=torch.cat([each.values for each in matrices]),
        scales=torch.cat([each.scales for each in matrices]),
        zeros=torch.cat([_zeros(each) for each in matrices]) if has_zeros else None,
        minimums=None if first.minimums is None else torch.cat([_minimums(each) for each in matrices]),
        bits=first.bits,
    )


def pack(matrix: GroupedMatrix) -> PackedMatrix:
    """Lay a matrix out for the kernel."""
    check_groups(matrix)
    out_len, in_len = matrix.values.shape
    in_padded, out_padded = _round_up(in_len, block_len(matrix.bits)), _round_up(out_len, OUT_MULTIPLE)
    group_len = in_padded if matrix.scales.shape[1] == 1 else matrix.group_len
    return PackedMatrix(
        words=_words(_padded(matrix.values, out_padded, in_padded), matrix.bits),
        tables=_padded(_tables(matrix), out_padded, -(-in_padded // group_len)).t().contiguous(),
        scale_dtype=matrix.scales.dtype,
        has_minimums=matrix.minimums is not None,
        bits=matrix.bits,
        group_len=group_len,
        out_len=out_len,
        in_len=in_len,
    )


def _words(values: Tensor, bits: int) -> Tensor:
    """[out_padded, in_padded] uint8 to words [num_blocks, out_padded, SLICE_LEN]."""
    fields = _WORD_BITS // bits
    slices = values.view(values.shape[0], -1, fields, SLICE_LEN).transpose(0, 1)
    words = torch.zeros((*slices.shape[:2], SLICE_LEN), dtype=torch.int16, device=values.device)
    for field in range(fields):  # one at a time: little memory beside the matrix
        words |= slices[:, :, field].to(torch.int16) << (bits * field)
    return words


def _tables(matrix: GroupedMatrix) -> Tensor:
    """[out_len, num_groups]: scales, and what values begin at."""
    starts = -ZERO_BASE - _zeros(matrix).to(torch.bfloat16) if matrix.minimums is None else matrix.minimums
    low, high = (half.contiguous().view(torch.int16).to(torch.int32) for half in (matrix.scales, starts))
    return (low & 0xFFFF) | (high << 16)


def _zeros(matrix: GroupedMatrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.full_like(matrix.scales, 2 ** (matrix.bits - 1), dtype=torch.uint8)


def _minimums(matrix: GroupedMatrix) -> Tensor:
    assert matrix.minimums is not None
    return matrix.minimums


def _padded(table: Tensor, rows: int, columns: int) -> Tensor:
    return pad(table, (0, columns - table.shape[1], 0, rows - table.shape[0]))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
