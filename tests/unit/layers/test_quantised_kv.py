"""A head's vector as codes and a scale: to the nearest, by its own size alone, zeros and what is no number included."""

import pytest
import torch

from roost.layers.quantised_kv import CODE_DTYPES, CODE_MAX, SCALE_LEAST, dequantise, quantise

CODES = pytest.mark.parametrize("codes", CODE_DTYPES.values(), ids=CODE_DTYPES)
HALF_STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}  # of the largest number, where steps are widest


@CODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_at_most_half_a_step_from_what_was_written(codes: torch.dtype, dtype: torch.dtype) -> None:
    vectors = torch.randn((50, 3, 80), generator=torch.Generator().manual_seed(1)).to(dtype)
    kept, scales = quantise(vectors, codes)
    assert (kept.dtype, scales.dtype, scales.shape) == (codes, torch.float32, (50, 3))
    sizes = vectors.to(torch.float32).abs().amax(dim=-1)
    torch.testing.assert_close(scales * CODE_MAX[codes], sizes)
    error = (dequantise(kept, scales, torch.float32) - vectors.to(torch.float32)).abs() / sizes[..., None]
    assert error.max() < HALF_STEP[codes] * (1 + 1e-5)
    assert dequantise(kept, scales, dtype).dtype == dtype


@CODES
def test_a_vector_is_quantised_the_same_beside_any_others(codes: torch.dtype) -> None:
    vectors = (
        torch.randn((9, 2, 64), generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 6, 9)[:, None, None]
    )
    kept, scales = quantise(vectors, codes)
    for number in range(9):
        alone, scale = quantise(vectors[number : number + 1, 1:], codes)
        assert torch.equal(alone.view(torch.uint8)[0, 0], kept.view(torch.uint8)[number, 1])
        assert float(scale[0, 0]) == float(scales[number, 1])


def test_ties_go_to_the_even_code() -> None:
    halves = torch.tensor([[0.5, 1.5, 2.5, -0.5, -2.5, 127.0]])
    assert quantise(halves, torch.int8)[0].tolist() == [[0, 2, 2, 0, -2, 127]]
    between = torch.tensor([[17.0, 19.0, 2.0**-9 * 1.5, 2.0**-10, -17.0, 448.0]])
    assert quantise(between, torch.float8_e4m3fn)[0].tolist() == [[16.0, 20.0, 2.0**-8, 0.0, -16.0, 448.0]]


@CODES
def test_the_smallest_scale_is_one_that_has_a_reciprocal(codes: torch.dtype) -> None:
    least = SCALE_LEAST * CODE_MAX[codes]
    vectors = torch.tensor([[least, -least], [least * 0.49, least * 0.49], [0.0, -0.0]])
    kept, scales = quantise(vectors, codes)
    assert scales.tolist() == [SCALE_LEAST, 0.0, 0.0]
    assert kept.tolist() == [[CODE_MAX[codes], -CODE_MAX[codes]], [0.0, 0.0], [0.0, 0.0]]
    assert torch.isfinite(dequantise(kept, scales, torch.float32)).all()


@CODES
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_is_seen_by_its_readers_and_by_nobody_else(codes: torch.dtype, wrong: float) -> None:
    vectors = torch.ones((3, 16))
    vectors[1, 7] = wrong
    read = dequantise(*quantise(vectors, codes), torch.float32)
    assert read[1].isnan().all() and torch.equal(read[[0, 2]], vectors[[0, 2]])
