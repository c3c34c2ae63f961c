"""Speculation is invisible and leaves nothing behind: drafters, depths, pages, layers and loads, each with each."""

import pytest

from roost.front.speculation import total
from tests.support.spec_configs import AUTO_JOINT
from tests.support.spec_matrix import ABORT_TICKS, CELLS, OTHERS, QUANTISED, Cell, Matrix, drawn, work

DRAWN = drawn(num_together=3, joined=False) + drawn(num_together=2, joined=True)


@pytest.mark.parametrize("cell", DRAWN + OTHERS, ids=lambda cell: cell.name)
def test_output_is_that_of_plain_decoding_and_the_pool_is_as_before(cell: Cell) -> None:
    run(cell)


@pytest.mark.parametrize("cell", QUANTISED, ids=lambda cell: cell.name)
def test_with_quantised_kv_output_is_that_of_one_prefill_after_the_other(cell: Cell) -> None:
    run(cell)


@pytest.mark.full
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in DRAWN], ids=lambda cell: cell.name)
def test_in_the_rest_of_the_matrix_output_and_pool_are_the_same_too(cell: Cell) -> None:
    run(cell)


def run(cell: Cell) -> None:
    """Serve the work of a cell and check all that must hold whatever the cell."""
    served = Matrix(cell)
    requests = work()
    served.serve(requests)
    served.executor.close()
    for number, (prompt, num_new) in enumerate(requests):
        name = f"r{number}"
        output, expected, end = served.output(name), cell.expected(prompt, num_new), served.finish(name)
        if cell.load == "aborts" and name in ABORT_TICKS:
            assert (output, end.reason) == (expected[: len(output)], "abort"), name
        else:
            assert (output, end.reason) == (expected, "length"), name
        assert end.usage.completion_tokens == len(output), name
    assert_load_was_met(served)
    assert_sums(served)
    assert_nothing_held(served)


def assert_load_was_met(served: Matrix) -> None:
    """What the cell is about did happen."""
    stats, load, shape = served.stats(), served.cell.load, served.cell.shape
    assert (stats.spec.rounds > 0) == shape.speculates
    is_sure = "target" in served.cell.drafter and served.cell.shape != AUTO_JOINT  # which may leave drafts alone
    assert stats.spec.drafts_accepted > 0 or not is_sure
    if load == "mixed":
        assert any(0 < plan.is_prefill.sum() < len(plan.rows) for plan in served.plans)
        assert any(plan.is_prefill.any() and not plan.is_final.any() for plan in served.plans)
    assert (stats.retractions > 0) == (load == "preemptions"), stats.retractions
    outputs = {name: len(served.output(name)) for name in ABORT_TICKS if served.finish(name).reason == "abort"}
    assert set(outputs) == (set(ABORT_TICKS) if load == "aborts" else set())
    for name, was_in_rounds in {"r0": False, "r4": False, "r1": True, "r2": True}.items() if load == "aborts" else ():
        assert (outputs[name] > 0) == was_in_rounds, outputs


def assert_sums(served: Matrix) -> None:
    """What the requests were told adds up to what the engine says."""
    stats, names = served.stats(), [f"r{number}" for number in range(len(work()))]
    assert total(served.finish(name).spec for name in names) == stats.spec
    assert sum(stats.spec.histogram) == stats.spec.rounds
    assert sum(place * count for place, count in enumerate(stats.spec.histogram)) == stats.spec.drafts_accepted
    assert sum(len(served.output(name)) for name in names) == stats.completion_tokens


def assert_nothing_held(served: Matrix) -> None:
    """Every page is free or cached, and after a flush free."""
    for pool in served.stats().pools:
        assert (pool.leased, pool.retiring) == (0, 0), pool
        assert pool.free + pool.cached == pool.total, pool
    served.flush()
    for pool in served.stats().pools:
        assert pool.free == pool.total, pool
