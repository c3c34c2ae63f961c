"""The gate equals activation(gate) * up in float32, rounded once."""

import pytest
import torch

from roost.layers.ops import CLAMPED, TORCH_OPS
from tests.support.canaries import DTYPES, Fenced, assert_near

gate = pytest.importorskip("roost.kernels.gated_activation")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", CLAMPED])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 14336), (7, 1536), (3, 1001), (2, 5)])
def test_the_gate_equals_the_reference(
    num_tokens: int, width: int, activation: str, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(width)
    both = (torch.randn((num_tokens, 2 * width + 40), generator=generator) * 4).to(device, dtype)[:, 8 : 8 + 2 * width]
    both[0, 0], both[-1, 1] = -120.0, 120.0  # where exponents run over
    out = Fenced((num_tokens, width), dtype, device)
    ours = gate.gate_up(both, activation, out=out.tensor)
    out.check()
    assert_near(ours, TORCH_OPS.gate_up(both.to(torch.float32), activation).to(dtype))
    apart = both[:, width:].clone()  # of other strides than the gate's
    assert torch.equal(gate.gate_by(both[:, :width], apart, activation), ours)
