"""The arg-max of a recorded product: what an arg-max over all of its outputs says, ties and odd shapes included."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.layers.gguf_blocks import BLOCK_KINDS
from roost.layers.linear import make_linear
from roost.layers.ops import TORCH_OPS
from roost.numba_kernels.execution import TOKENS_MAX, RecordedPass, execution
from roost.numba_kernels.ops import NUMBA_OPS, PackedLinear
from tests.numba_kernels.test_linear import gguf, kept, tokens

COUNTS = (1, 2, 5, 8, 9, TOKENS_MAX, TOKENS_MAX + 1)  # few, many, and more than are recorded


def best_of(project: PackedLinear, x: Tensor) -> Tensor:
    """The best output of each token, as a pass finds it."""

    def forward(inputs: Sequence[Tensor]) -> tuple[Tensor]:
        return (NUMBA_OPS.argmax(project(inputs[0])),)

    return RecordedPass().run(None, forward, (x,), None)[0].clone()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("out_len", [1, 16, 40, 1000])  # less than a group, one, a cut one, more than there are pieces
def test_the_best_output_is_the_arg_max_of_all(kind: str, out_len: int) -> None:
    bias = torch.randn(out_len)
    for project in (kept(gguf(kind, out_len, 64)), kept(gguf(kind, out_len, 64, bias))):
        for count in COUNTS:
            x = tokens(64, 64).repeat(2, 1)[:count]
            assert torch.equal(best_of(project, x), TORCH_OPS.argmax(project(x))), count


def test_of_equal_outputs_the_lowest_is_best() -> None:
    weight = torch.randn(24, 32).repeat(20, 1)  # each output twenty times, in other pieces and lanes
    project = kept(make_linear(weight, None, "int8"))
    x = tokens(9, 32)
    found = best_of(project, x)
    assert torch.equal(found, TORCH_OPS.argmax(project(x)))
    assert found.max() < 24
    assert best_of(project, torch.zeros(3, 32)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [(3,), (39,), (5, 70), (0, 1, 99)])
def test_an_output_that_is_not_a_number_or_infinite_counts_as_torch_counts_it(
    special: float, places: tuple[int, ...]
) -> None:
    bias = torch.zeros(100)
    bias[list(places)] = special
    project = kept(make_linear(torch.randn(100, 32), bias, "int8"))
    x = tokens(5, 32)
    assert torch.equal(best_of(project, x), TORCH_OPS.argmax(project(x)))
    everywhere = kept(make_linear(torch.randn(100, 32), torch.full((100,), special), "int8"))
    assert torch.equal(best_of(everywhere, x), TORCH_OPS.argmax(everywhere(x)))


@pytest.mark.parametrize("has_bias", [False, True])
def test_capped_outputs_are_those_of_the_reference_and_the_best_of_them_is_their_arg_max(has_bias: bool) -> None:
    """With a cap so low that many are equal; recorded or not they have the same bits."""
    bias = torch.randn(200) if has_bias else None
    project, x = kept(make_linear(torch.randn(200, 32) * 4, bias, "int8")), tokens(9, 32)

    def logits(inputs: Sequence[Tensor]) -> tuple[Tensor]:
        (found,) = (project(inputs[0]),)
        NUMBA_OPS.soft_cap(found, 3.0)
        return (found,)

    exact, direct = project(x), logits((x,))[0]
    TORCH_OPS.soft_cap(exact, 3.0)
    torch.testing.assert_close(direct, exact, rtol=0, atol=2e-6)
    assert (direct == direct.amax(dim=1, keepdim=True)).sum() > 2 * len(direct)
    assert torch.equal(RecordedPass().run(None, logits, (x,), None)[0], direct)
    best = RecordedPass().run(None, lambda inputs: (NUMBA_OPS.argmax(logits(inputs)[0]),), (x,), None)[0]
    assert torch.equal(best, TORCH_OPS.argmax(direct))


@pytest.mark.parametrize("length", [1, 20])
def test_a_cap_keeps_what_is_no_number_and_holds_what_is_infinite(length: int) -> None:
    logits = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -1e30]).repeat_interleave(length)[None]
    NUMBA_OPS.soft_cap(logits, 30.0)
    expected = torch.tensor([torch.nan, 30.0, -30.0, 0.0, -30.0]).repeat_interleave(length)[None]
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_an_arg_max_of_anything_else_is_computed_without_a_recording() -> None:
    project, x = kept(make_linear(torch.randn(40, 32), None, "int8")), tokens(3, 32)

    def forward(inputs: Sequence[Tensor]) -> tuple[Tensor]:
        return (NUMBA_OPS.argmax(inputs[0]),)

    def of_a_part(inputs: Sequence[Tensor]) -> tuple[Tensor]:
        return (NUMBA_OPS.argmax(project(inputs[0])[:, :16]),)

    for function in (forward, of_a_part):
        assert torch.equal(RecordedPass().run(None, function, (x,), None)[0], function((x,))[0])
    assert not execution().is_recording


def test_entries_of_a_table_of_ids_are_looked_up_as_they_are() -> None:
    table, at = torch.tensor([5, 2**62 + 1, -(2**40), 0, 7]), torch.tensor([4, 1, 1, 2, 0])
    for ids in (at, at.view(5, 1), torch.stack([at, at])):
        assert torch.equal(NUMBA_OPS.look_up(table, ids), table[ids])
