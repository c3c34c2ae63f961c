"""Linear layers: int8 weights are near the weights they stand for, and a token never depends on its neighbours."""

import pytest
import torch

from roost.errors import ConfigError
from roost.layers.linear import make_linear


@pytest.mark.parametrize("in_len", [7, 64, 576])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_row_is_bit_equal_whatever_the_number_of_rows_beside_it(in_len: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(in_len)
    weight = torch.randn(40, in_len, generator=generator)
    project = make_linear(weight, torch.randn(40, generator=generator) if has_bias else None, "int8")
    row = torch.randn(1, in_len, generator=generator)
    alone = project(row)
    for num_rows in (2, 3, 8, 64):
        beside = torch.randn(num_rows, in_len, generator=generator) * 1000  # outliers, which must not matter
        for place in (0, num_rows // 2, num_rows - 1):
            beside[place] = row
            assert torch.equal(project(beside)[place : place + 1], alone), (num_rows, place)


def test_int8_products_are_near_those_of_the_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 128, generator=generator)
    hidden = torch.randn(5, 128, generator=generator) * torch.tensor([1e-6, 0.1, 1.0, 50.0, 1e6])[:, None]
    exact, rounded = hidden @ weight.T, make_linear(weight, None, "int8")(hidden)
    error = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 0.02


def test_rows_and_outputs_of_zeros_stay_zero() -> None:
    weight = torch.randn(6, 8)
    weight[2] = 0
    outputs = make_linear(weight, None, "int8")(torch.stack([torch.zeros(8), torch.ones(8)]))
    assert torch.equal(outputs[0], torch.zeros(6))
    assert outputs[1, 2] == 0 and outputs.isfinite().all()


def test_an_unknown_form_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match="--weights must be one of fp32, bf16, int8, fp8, int4, gguf, got int3"):
        make_linear(torch.zeros(2, 2), None, "int3")
