"""Products by 4-bit and 8-bit weights equal the reference at odd sizes, in every format, however they are cut."""

import pytest
import torch
from torch import Tensor

from roost.layers.grouped import GroupedMatrix, pack
from tests.support.canaries import Fenced

kernel = pytest.importorskip("roost.kernels.grouped_linear")
Tile = kernel.Tile


def drawn(out_len: int, in_len: int, group_len: int, kind: str, device: torch.device) -> GroupedMatrix:
    """A random matrix: symmetric, with zero points, or with minimums; `bytes` has 8 bits."""
    bits, groups, generator = 8 if kind == "bytes" else 4, in_len // group_len, torch.Generator().manual_seed(in_len)
    scales = (torch.rand((out_len, groups), generator=generator) * 0.02 + 0.01).to(device, torch.float16)
    zeros = torch.randint(0, 16, (out_len, groups), generator=generator, dtype=torch.uint8).to(device)
    return GroupedMatrix(
        values=torch.randint(0, 2**bits, (out_len, in_len), generator=generator, dtype=torch.uint8).to(device),
        scales=scales,
        zeros=zeros if kind == "zeros" else None,
        minimums=-4 * scales if kind == "minimums" else None,
        bits=bits,
    )


def assert_near(ours: Tensor, hidden: Tensor, matrix: GroupedMatrix, bias: Tensor | None = None) -> None:
    """One rounding of bfloat16; where weights are rounded themselves, what those roundings add up to."""
    exact = hidden.float() @ matrix.dequantise().t() + (0 if bias is None else bias.float())
    size = hidden.float().norm(dim=1, keepdim=True) * matrix.dequantise().norm(dim=1)
    assert ours.dtype == torch.bfloat16 and ours.shape == exact.shape
    assert ((ours.float() - exact).abs() <= 2**-7 * exact.abs() + 2**-8 * size).all()


def tokens(num_tokens: int, in_len: int, device: torch.device) -> Tensor:
    """Rows that lie further apart than they are long, with nothing to be read between them."""
    rows = torch.randn((num_tokens, in_len + 8), generator=torch.Generator().manual_seed(num_tokens))
    rows[:, in_len:] = torch.nan
    return rows.to(device, torch.bfloat16)[:, :in_len]


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 70, 130])
@pytest.mark.parametrize(
    ("out_len", "in_len", "group_len", "kind"),
    [
        (130, 576, 64, "symmetric"),
        (72, 320, 32, "zeros"),
        (40, 256, 128, "zeros"),
        (64, 200, 200, "symmetric"),
        (33, 512, 256, "zeros"),
        (64, 96, 32, "minimums"),
        (64, 160, 32, "bytes"),
    ],
)
def test_a_projection_equals_the_reference(
    num_tokens: int, out_len: int, in_len: int, group_len: int, kind: str, device: torch.device
) -> None:
    matrix, hidden = drawn(out_len, in_len, group_len, kind, device), tokens(num_tokens, in_len, device)
    bias = torch.linspace(-4, 4, out_len, device=device) if out_len % 2 else None
    assert_near(kernel.GroupedLinear(pack(matrix), bias)(hidden), hidden, matrix, bias)


@pytest.mark.parametrize(("tile_tokens", "splits"), [(8, 1), (8, 3), (16, 2), (4, 16)])
def test_however_it_is_cut_it_is_the_same_product_and_the_counters_are_zero_again(
    tile_tokens: int, splits: int, device: torch.device
) -> None:
    matrix, hidden = drawn(100, 640, 128, "zeros", device), tokens(5, 640, device)
    bias = torch.linspace(-4, 4, 100, device=device, dtype=torch.bfloat16)
    arrivals, out = torch.zeros(4, dtype=torch.int32, device=device), Fenced((5, 100), torch.bfloat16, device)
    tile = Tile(tokens=tile_tokens, outs=64, splits=splits)
    ours = kernel.product(hidden, pack(matrix), bias, arrivals, tile, out=out.tensor)
    out.check()
    assert_near(ours, hidden, matrix, bias)
    again = kernel.product(hidden, pack(matrix), bias, arrivals, tile)
    assert torch.equal(ours, again) and not arrivals.any()


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "minimums", "bytes"])
def test_rows_made_floats_are_the_reference_rounded_once(kind: str, device: torch.device) -> None:
    matrix = drawn(150, 224, 32, kind, device)
    out = Fenced((70, 224), torch.bfloat16, device)
    kernel.dequantise_rows(pack(matrix), 65, out.tensor)
    out.check()
    torch.testing.assert_close(out.tensor.float(), matrix.dequantise()[65:135], rtol=2**-7, atol=1e-6)


def test_many_tokens_are_multiplied_by_floats_part_after_part(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_DENSE_WEIGHTS", 1)  # as few outputs at a time as there can be
    matrix = drawn(300, 128, 64, "zeros", device)
    bias = torch.linspace(-4, 4, 300, device=device)
    project = kernel.GroupedLinear(pack(matrix), bias)
    for num_tokens in (kernel._DENSE_FROM - 1, kernel._DENSE_FROM):
        hidden = tokens(num_tokens, 128, device)
        assert_near(project(hidden), hidden, matrix, bias)
    assert project(hidden[:0]).shape == (0, 300)


SPLITS = {  # outputs and inputs -> how often the inputs are split for 8, 64, 128 and 200 tokens, as measured fastest
    (6144, 4096): (4, 4, 2, 1),
    (4096, 4096): (4, 4, 4, 1),
    (28672, 4096): (1, 1, 1, 1),
    (4096, 14336): (8, 8, 4, 1),
    (960, 576): (2, 2, 2, 1),
    (576, 1536): (4, 4, 4, 1),
    (128, 128): (1, 1, 1, 1),
}


@pytest.mark.parametrize(("out_len", "in_len"), SPLITS)
def test_tiles_keep_the_device_busy_and_have_counters(out_len: int, in_len: int) -> None:
    words = torch.empty((-(-in_len // 128), -(-out_len // 128) * 128, 32), dtype=torch.int16, device="meta")
    matrix = kernel.PackedMatrix(
        words=words,
        tables=words,
        scale_dtype=torch.float16,
        has_minimums=False,
        bits=4,
        group_len=64,
        out_len=out_len,
        in_len=in_len,
    )
    tiles = {num_tokens: kernel.choose_tile(num_tokens, matrix) for num_tokens in (1, 8, 9, 17, 33, 64, 65, 128, 200)}
    assert tuple(tiles[num_tokens].splits for num_tokens in (8, 64, 128, 200)) == SPLITS[out_len, in_len]
    for num_tokens, tile in tiles.items():
        assert tile.splits == 1 or num_tokens <= tile.tokens
        assert words.shape[1] % tile.outs == 0 and tile.outs >= kernel._OUTS_LEAST and tile.splits <= len(words)
        assert tile.outs == (128 if num_tokens > 32 or (num_tokens > 8 and out_len > 2**14) else 64)
