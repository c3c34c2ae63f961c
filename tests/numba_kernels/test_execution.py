"""Recorded passes: what is replayed is what would be computed, and what cannot be recorded is computed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from roost.layers.linear import make_linear
from roost.layers.ops import Residual
from roost.numba_kernels.execution import TOKENS_MAX, RecordedPass, execution
from roost.numba_kernels.ops import NUMBA_OPS

torch.manual_seed(0)
FIRST = NUMBA_OPS.keep(make_linear(torch.randn(64, 32), None, "int8"), True)
SECOND = NUMBA_OPS.keep(make_linear(torch.randn(32, 32), None, "int8"), False)
NORM = torch.rand(32)


def feed(inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A layer's second half: what it adds up to, and what it read."""
    (hidden,) = inputs
    total, gated = NUMBA_OPS.norm_gate_up(Residual(hidden), NORM, 1e-5, FIRST, "silu")
    return NUMBA_OPS.linear_add(gated, SECOND, total, None).total(), gated


def equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_a_recorded_pass_has_the_bits_of_a_direct_one_at_any_number_of_tokens() -> None:
    recorded = RecordedPass()
    for count in (3, 1, TOKENS_MAX, 9, TOKENS_MAX + 1, 2):
        inputs = (torch.randn(count, 32),)
        assert equal(recorded.run("layer", feed, inputs, None), feed(inputs)), count


def test_what_a_pass_returned_can_be_its_next_input() -> None:
    recorded, hidden = RecordedPass(), torch.randn(5, 32)
    expected = hidden
    for _ in range(4):
        hidden = recorded.run("layer", feed, (hidden,), None)[0]
        expected = feed((expected,))[0]
        assert torch.equal(hidden, expected)


def test_inputs_may_lie_anywhere() -> None:
    recorded, wide = RecordedPass(), torch.randn(6, 64)
    for part in (wide[:, 32:], wide[::2, :32], wide[1:4, :32]):
        assert equal(recorded.run("layer", feed, (part,), None), feed((part,)))


def test_shapes_are_recorded_apart_and_told_of_each_batch() -> None:
    recorded, seen = RecordedPass(), []

    def told(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        execution().before_run(seen.append)
        return (SECOND(inputs[0]),)

    x = torch.randn(2, 32)
    assert equal(recorded.run("told", told, (x,), "first"), (SECOND(x),))
    assert equal(recorded.run("layer", feed, (x,), "other"), feed((x,)))
    assert equal(recorded.run("told", told, (x,), "second"), (SECOND(x),))
    assert seen == ["first", "second"]


def test_a_pass_that_torch_computes_a_part_of_is_not_recorded() -> None:
    recorded = RecordedPass()

    def mixed(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (SECOND(inputs[0]) * 2,)

    for _ in range(2):
        x = torch.randn(3, 32)
        assert equal(recorded.run("mixed", mixed, (x,), None), mixed((x,)))
    assert torch.equal(SECOND(x), SECOND(x)), "and nothing is being recorded any more"


def test_threads_take_turns() -> None:
    inputs = [torch.randn(3, 32) for _ in range(4)]
    expected = [feed((each,)) for each in inputs]
    passes = [RecordedPass() for _ in inputs]

    def work(number: int) -> bool:
        own, theirs = (inputs[number],), expected[number]
        return all(
            equal(passes[number].run("layer", feed, own, None), theirs) and equal(feed(own), theirs) for _ in range(50)
        )

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
