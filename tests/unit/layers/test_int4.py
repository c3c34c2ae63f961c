"""4-bit weights: near the floats they are made of, and packed so that nothing of them is lost."""

import pytest
import torch
from torch import Tensor

from roost.layers.grouped import GroupedMatrix, PackedMatrix, block_len, concatenate, pack
from roost.layers.int4 import Int4Weight, quantise
from roost.layers.linear import head_form
from roost.layers.quantised import stack


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("in_len", "group_len"), [(256, 128), (576, 64), (96, 32), (50, 50)])
def test_weights_rounded_at_load_are_near_the_floats(in_len: int, group_len: int) -> None:
    weight = noise(24, in_len) * torch.logspace(-4, 2, 24)[:, None]
    kept = quantise(weight)
    assert kept.matrix.group_len == group_len and kept.shape == (24, in_len)
    error = (kept.dequantise() - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < 0.14


def test_groups_of_equal_weights_and_of_zeros_stay_what_they_are() -> None:
    weight = torch.cat([torch.zeros(1, 128), torch.full((1, 128), 0.5), torch.full((1, 128), -2.0)])
    torch.testing.assert_close(quantise(weight).dequantise(), weight, rtol=0.01, atol=0.0)


def test_a_stack_is_its_parts_one_below_the_other() -> None:
    parts = [quantise(noise(out_len, 128, seed=out_len)) for out_len in (48, 24, 24)]
    symmetric = Int4Weight(matrix=GroupedMatrix(values=parts[0].matrix.values, scales=parts[0].matrix.scales))
    whole = stack([*parts, symmetric])
    assert whole is not None and whole.shape == (144, 128)
    assert torch.equal(whole.dequantise(), torch.cat([part.dequantise() for part in (*parts, symmetric)]))


def test_weights_with_other_groups_are_not_stacked() -> None:
    assert stack([quantise(noise(8, 128)), Int4Weight(matrix=quantise(noise(8, 64)).matrix)]) is None
    fine, coarse = quantise(noise(8, 64)).matrix, quantise(noise(8, 128)).matrix
    halves = GroupedMatrix(values=coarse.values, scales=coarse.scales.repeat(1, 2))
    assert concatenate([coarse, halves]) is None and concatenate([fine, fine]) is not None


def test_the_lm_head_stays_bf16_beside_4_bit_projections() -> None:
    assert (head_form("int4"), head_form("bf16"), head_form("fp32")) == ("bf16", "bf16", "fp32")


def unpacked(matrix: PackedMatrix) -> Tensor:
    """Values [out_len, in_len], each looked up where the layout says it lies."""
    fields = 16 // matrix.bits
    inputs = torch.arange(matrix.in_len)
    block, field, word = inputs // (32 * fields), inputs // 32 % fields, inputs % 32
    words = matrix.words[block, : matrix.out_len, word]  # [in_len, out_len]
    return ((words >> (matrix.bits * field)[:, None]) & (2**matrix.bits - 1)).t().to(torch.uint8)


def halves(matrix: PackedMatrix, num_groups: int) -> tuple[Tensor, Tensor]:
    """The low and the high half of its tables, as bits [out_len, num_groups]."""
    tables = matrix.tables[:num_groups, : matrix.out_len].t().contiguous().view(torch.int16)
    return tables[:, ::2].contiguous(), tables[:, 1::2].contiguous()


def test_minimums_are_kept_beside_scales_in_their_own_type() -> None:
    scales = noise(5, 3).to(torch.float16)
    kept = pack(GroupedMatrix(values=torch.zeros((5, 96), dtype=torch.uint8), scales=scales, minimums=-scales))
    assert kept.has_minimums and kept.scale_dtype == torch.float16
    assert all(
        torch.equal(half.view(torch.float16), own) for half, own in zip(halves(kept, 3), (scales, -scales), strict=True)
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("out_len", "in_len", "group_len"), [(3, 576, 64), (130, 256, 32), (7, 40, 40), (128, 768, 128)]
)
def test_a_packed_matrix_has_every_value_scale_and_zero_in_its_place(
    bits: int, out_len: int, in_len: int, group_len: int
) -> None:
    generator = torch.Generator().manual_seed(in_len)
    groups = in_len // group_len
    matrix = GroupedMatrix(
        values=torch.randint(0, 2**bits, (out_len, in_len), generator=generator, dtype=torch.uint8),
        scales=torch.rand((out_len, groups), generator=generator).to(torch.float16),
        zeros=torch.randint(0, 16, (out_len, groups), generator=generator, dtype=torch.uint8) if bits == 4 else None,
        bits=bits,
    )
    kept = pack(matrix)
    assert kept.words.shape == (-(-in_len // block_len(bits)), 128 if out_len <= 128 else 256, 32)
    assert torch.equal(unpacked(kept), matrix.values)
    scales, starts = halves(kept, groups)
    zeros = torch.full((out_len, groups), 128) if matrix.zeros is None else matrix.zeros
    assert torch.equal(scales.view(torch.float16), matrix.scales)
    assert torch.equal(-starts.view(torch.bfloat16).float() - 128, zeros.float())
    assert kept.num_bytes >= out_len * in_len * bits // 8
