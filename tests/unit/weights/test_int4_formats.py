"""Readers of 4-bit packings: what does not fit together is refused, and says why."""

import pytest
import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.weights.int4_formats import AWQ_PACKING, COMPRESSED_PACKING, GPTQ_PACKING
from roost.weights.packing import Packing
from roost.weights.quantisation import Quantisation, read_quantisation
from tests.support.int4_folders import FORMATS, Drawn, Format, draw, packed, stored

PACKINGS = {"awq": AWQ_PACKING, "gptq": GPTQ_PACKING, "compressed": COMPRESSED_PACKING}


def checkpoint(layout: Format, out_len: int = 24, in_len: int = 256) -> tuple[Drawn, dict[str, Tensor], Quantisation]:
    """A projection: the drawn matrix, its tensors, and what its config says."""
    matrix = draw(out_len, in_len, layout, torch.Generator().manual_seed(3))
    quantisation = read_quantisation({"quantization_config": layout.config()})
    assert quantisation is not None
    return matrix, stored(matrix, layout), quantisation


def read(packing: Packing, parts: dict[str, Tensor], quantisation: Quantisation) -> Tensor:
    return packing.read(
        {name: part for name, part in parts.items() if name in packing.parts}, quantisation
    ).dequantise()


@pytest.mark.parametrize("name", FORMATS)
def test_a_projection_is_read_exactly(name: str) -> None:
    layout = FORMATS[name]
    matrix, parts, quantisation = checkpoint(layout)
    assert torch.equal(read(PACKINGS[layout.method], parts, quantisation), matrix.floats())


def test_zero_points_of_symmetric_gptq_that_were_left_at_nothing_mean_nothing() -> None:
    matrix, parts, quantisation = checkpoint(FORMATS["gptq-symmetric"])
    empty = {**parts, "qzeros": torch.zeros_like(parts["qzeros"])}
    assert torch.equal(read(GPTQ_PACKING, empty, quantisation), matrix.floats())


def test_zero_points_that_are_not_packed_are_read_with_their_sign() -> None:
    matrix, parts, quantisation = checkpoint(FORMATS["compressed-zeros"])
    plain = {**parts, "weight_zero_point": (matrix.zeros - 8).to(torch.int8)}
    assert torch.equal(read(COMPRESSED_PACKING, plain, quantisation), matrix.floats())


def test_outputs_and_inputs_that_do_not_fill_their_last_words_are_read() -> None:
    layout = Format(method="compressed", group=None, has_zeros=True)
    matrix, _, quantisation = checkpoint(layout, out_len=16, in_len=264)
    cut = Drawn(values=matrix.values[:11, :261], zeros=matrix.zeros[:11], scales=matrix.scales[:11])
    parts = {
        "weight_packed": packed(torch.nn.functional.pad(cut.values, (0, 3)), 1),
        "weight_scale": cut.scales,
        "weight_shape": torch.tensor([11, 261]),
        "weight_zero_point": packed(torch.nn.functional.pad(cut.zeros, (0, 0, 0, 5)), 0),
    }
    assert torch.equal(read(COMPRESSED_PACKING, parts, quantisation), cut.floats())


REFUSED: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("awq", {"qzeros": None}, "it has qweight, scales, but no qzeros"),
    ("awq", {"qweight": torch.zeros(256, 3)}, r"its packed values are \[256, 3\] of torch.float32; .* int32 is needed"),
    (
        "awq",
        {"scales": torch.ones(4, 24)},
        r"its scales are \[24, 4\].* 24 by 256 weights in groups of 128 need \[24, 2\]",
    ),
    ("awq", {"qzeros": torch.zeros(1, 3, dtype=torch.int32)}, r"its zero points are \[24, 1\]"),
    ("gptq", {"g_idx": torch.arange(256).flip(0) // 64}, "its g_idx puts inputs .* into one group .act-order., not"),
    ("gptq-symmetric", {"qzeros": torch.ones(2, 3, dtype=torch.int32)}, "says that it is symmetric .* not all 8"),
    ("compressed", {"weight_packed": None}, "it has weight_scale, weight_shape, but no weight_packed"),
    ("compressed", {"weight_shape": torch.tensor([24, 240])}, r"holds \[24, 256\], its weight_shape says \[24, 240\]"),
    ("compressed-zeros", {"weight_zero_point": None}, "but no weight_zero_point"),
]


@pytest.mark.parametrize(("name", "changed", "says"), REFUSED)
def test_tensors_that_do_not_fit_are_refused(name: str, changed: dict[str, Tensor | None], says: str) -> None:
    layout = FORMATS[name]
    _, parts, quantisation = checkpoint(layout)
    mixed = {part: tensor for part, tensor in {**parts, **changed}.items() if tensor is not None}
    with pytest.raises(ConfigError, match=says):
        read(PACKINGS[layout.method], mixed, quantisation)


@pytest.mark.parametrize(
    ("group", "in_len", "is_fine"),
    [(32, 96, True), (96, 192, False), (48, 96, False), (384, 768, True), (16, 64, False)],
)
def test_groups_are_of_32_64_or_a_multiple_of_128(group: int, in_len: int, is_fine: bool) -> None:
    matrix, parts, quantisation = checkpoint(Format(method="compressed", group=group, has_zeros=False), in_len=in_len)
    if is_fine:
        assert torch.equal(read(COMPRESSED_PACKING, parts, quantisation), matrix.floats())
        return
    with pytest.raises(ConfigError, match=f"groups of {group} of {in_len} inputs are not supported; supported are"):
        read(COMPRESSED_PACKING, parts, quantisation)
