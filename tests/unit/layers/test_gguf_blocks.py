"""GGUF blocks: the floats of a weight are those of the gguf package, and rows can be stacked and reordered whole."""

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from roost.layers.gguf_blocks import BLOCK_KINDS, GgufWeight
from roost.layers.grouped import pack
from roost.layers.quantised import stack


def drawn(kind: str, out_len: int = 10, in_len: int = 96, seed: int = 0) -> tuple[GgufWeight, Tensor]:
    """A weight, and its floats by the gguf package."""
    floats = torch.randn((out_len, in_len), generator=torch.Generator().manual_seed(seed)).numpy()
    raw = gguf.quants.quantize(floats, Kind[kind])
    blocks = torch.from_numpy(raw.copy()).unflatten(1, (-1, BLOCK_KINDS[kind].num_bytes))
    expected = torch.from_numpy(gguf.quants.dequantize(raw, Kind[kind]).copy())
    return GgufWeight(blocks=blocks, kind=BLOCK_KINDS[kind]), expected


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_floats_are_those_of_the_format(kind: str) -> None:
    weight, expected = drawn(kind)
    assert weight.shape == (10, 96) and torch.equal(weight.dequantise(), expected)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_stack_is_its_parts_one_below_the_other(kind: str) -> None:
    parts = [drawn(kind, out_len, seed=out_len)[0] for out_len in (6, 3)]
    whole = stack(parts)
    assert whole is not None and torch.equal(whole.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_blocks_of_different_kinds_are_not_stacked() -> None:
    assert stack([drawn("Q4_0")[0], drawn("Q4_1")[0]]) is None


@pytest.mark.parametrize(("kind", "share"), [("Q4_0", 5.0), ("Q4_1", 5.0), ("Q8_0", 9.0)])
def test_repacked_for_the_kernel_they_take_at_most_half_a_bit_more(kind: str, share: float) -> None:
    weight, _ = drawn(kind, out_len=128, in_len=256)
    assert pack(weight.matrix()).num_bytes == 128 * 256 * share / 8
