"""Projections of few tokens equal norm, product, gate and sum one after the other, each in float32."""

import pytest
import torch
from torch import Tensor

from roost.layers.norm import rms_norm
from roost.layers.ops import ACTIVATIONS
from tests.support.canaries import Fenced, assert_near

one = pytest.importorskip("roost.kernels.one_token_linear")
few = pytest.importorskip("roost.kernels.few_token_linear")
tilings = pytest.importorskip("roost.kernels.linear_tilings")
RowTiling, BlockTiling = tilings.RowTiling, tilings.BlockTiling
EPS = 1e-5

WHOLE = RowTiling(4, 128, 4)
WALKED = RowTiling(2, 128, 4, num_programs=3)
LONG = RowTiling(8, 32, 4)
BLOCKS = BlockTiling(16, 16, 32, num_stages=3)
WITH_TMA = BlockTiling(16, 16, 32, num_stages=3, uses_tma=True)


class Case:
    """Inputs of a product, its tokens further apart than they are long."""

    def __init__(self, num_tokens: int, out_len: int, in_len: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(out_len + num_tokens)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

        self.x = noise(num_tokens, in_len + 16)[:, 8 : 8 + in_len]
        self.weight = noise(out_len, in_len) * in_len**-0.5
        self.norm = torch.rand(in_len, generator=generator).to(device) + 0.5
        self.next_norm = torch.rand(out_len, generator=generator).to(device) + 0.5
        self.residual = noise(num_tokens, out_len + 8)[:, :out_len]
        self.out = Fenced((num_tokens, out_len), torch.bfloat16, device)

    def product(self, x: Tensor) -> Tensor:
        """Of an input in float32."""
        return x.to(torch.float32) @ self.weight.to(torch.float32).T


def check(ours: Tensor, exact: Tensor) -> None:
    """Equal up to roundings: one of the output, and one of each input of the sums."""
    assert_near(ours, exact.to(torch.bfloat16), steps=2.0)


@pytest.mark.parametrize("tiling", [WHOLE, WALKED, LONG])
@pytest.mark.parametrize(("out_len", "in_len"), [(16, 96), (21, 72)])
def test_one_token_is_projected_and_added(tiling: RowTiling, out_len: int, in_len: int, device: torch.device) -> None:
    case = Case(1, out_len, in_len, device)
    one.one_token_linear(case.x, case.weight, tiling, residual=case.residual, out=case.out.tensor)
    case.out.check()
    check(case.out.tensor, case.product(case.x) + case.residual.to(torch.float32))
    again = one.one_token_linear(case.x, case.weight, tiling, residual=case.residual)
    assert torch.equal(again, case.out.tensor)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("tiling", [WHOLE, WALKED])
def test_one_token_is_normed_projected_and_gated(
    tiling: RowTiling, activation: str | None, device: torch.device
) -> None:
    case = Case(1, 18, 72, device)
    ours = one.one_token_linear(case.x, case.weight, tiling, norm_weight=case.norm, eps=EPS, activation=activation)
    exact = case.product(rms_norm(case.x.to(torch.float32), case.norm, EPS))
    gate, up = exact.chunk(2, dim=-1)
    check(ours, exact if activation is None else ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("tiling", [BLOCKS, WITH_TMA])
@pytest.mark.parametrize(("num_tokens", "out_len", "in_len"), [(2, 16, 96), (17, 21, 72)])
def test_few_tokens_are_projected_and_added_and_half_normed(
    tiling: BlockTiling, num_tokens: int, out_len: int, in_len: int, device: torch.device
) -> None:
    case = Case(num_tokens, out_len, in_len, device)
    scaled = few.new_scaled(num_tokens, case.weight, tiling, case.next_norm)
    few.few_token_linear(case.x, case.weight, tiling, residual=case.residual, scaled=scaled, out=case.out.tensor)
    case.out.check()
    check(case.out.tensor, case.product(case.x) + case.residual.to(torch.float32))
    summed = case.out.tensor.to(torch.float32)  # as it was rounded
    check(scaled.rows, summed * case.next_norm)
    torch.testing.assert_close(scaled.squares.sum(dim=1), summed.square().sum(dim=1))
    again = few.few_token_linear(case.x, case.weight, tiling, residual=case.residual)
    assert torch.equal(again, case.out.tensor)


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("tiling", [BLOCKS, WITH_TMA])
def test_what_was_half_normed_is_projected_and_gated(
    tiling: BlockTiling, activation: str | None, device: torch.device
) -> None:
    case = Case(3, 42, 72, device)
    rows = (case.x.to(torch.float32) * case.norm).to(torch.bfloat16)
    squares = torch.stack([part.to(torch.float32).square().sum(dim=1) for part in case.x.split(16, dim=1)], dim=1)
    ours = few.few_token_linear(rows, case.weight, tiling, squares=squares, eps=EPS, activation=activation)
    exact = case.product(rms_norm(case.x.to(torch.float32), case.norm, EPS))
    gate, up = exact.chunk(2, dim=-1)
    check(ours, exact if activation is None else ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("tiling", [BLOCKS, WITH_TMA])
def test_a_token_has_the_same_bits_whatever_else_is_in_its_block(tiling: BlockTiling, device: torch.device) -> None:
    case = Case(18, 16, 72, device)
    every = few.few_token_linear(case.x, case.weight, tiling)
    for number in (0, 17):
        alone = few.few_token_linear(case.x[number : number + 1], case.weight, tiling)
        assert torch.equal(alone[0], every[number])


SHAPES = [
    *((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False)),
    *((960, 576, False), (576, 576, False), (3072, 576, True), (576, 1536, False), (49152, 576, False)),
    *((57344, 8192, True), (8192, 28672, False), (36864, 12288, True)),
]


@pytest.mark.parametrize("shared_bytes", [227 * 1024, 99 * 1024])
@pytest.mark.parametrize("has_tma", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 32, 33, tilings.TOKENS_MAX])
def test_a_tiling_fits_the_device(num_tokens: int, has_tma: bool, shared_bytes: int) -> None:
    for out_len, in_len, is_gated in SHAPES:
        tiling = tilings.linear_tiling(
            num_tokens, out_len, in_len, is_gated=is_gated, has_tma=has_tma, shared_bytes=shared_bytes
        )
        if isinstance(tiling, BlockTiling):
            assert num_tokens > 1 and tiling.shared_bytes(is_gated) <= shared_bytes
            assert has_tma or not tiling.uses_tma
        elif tiling is not None:
            assert num_tokens == 1 and (tiling.block_k >= in_len or not is_gated)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 33, tilings.TOKENS_MAX])
def test_all_projections_of_the_measured_models_are_ours(num_tokens: int) -> None:
    for out_len, in_len, is_gated in SHAPES[:4] + SHAPES[5:9]:
        assert tilings.linear_tiling(
            num_tokens, out_len, in_len, is_gated=is_gated, has_tma=True, shared_bytes=227 * 1024
        )
