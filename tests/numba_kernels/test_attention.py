"""Attention in Numba equals its reference: any widths, trees, branches, windows, pages, head sizes and kinds of KV."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roost.attention.kv_cache import LayerKv
from tests.numba_kernels.runs import CPU, FP16, FP32, INT8, both, reader, team_of
from tests.support.attention_batches import Shape, make
from tests.support.canaries import assert_near

KINDS = pytest.mark.parametrize("dtype", [FP32, FP16, INT8], ids=["fp32", "fp16", "int8"])
STEPS = 4  # exponents of two are a few roundings from torch's
STEPS_OF_BYTES = 128  # queries are rounded to 15 bits where keys are int8


def shape_of(num_kv_heads: int, group: int, head_dim: int, page_size: int, window: int | None = None) -> Shape:
    return Shape(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, page_size=page_size, dtype=FP32, window=window
    )


def check(shape: Shape, columns: list[tuple[int, int]], dtype: torch.dtype, **how: object) -> None:
    """The kernels' result is the reference's; slots that nobody may read are NaN."""
    ours, reference = both(make(shape, columns, CPU, **how), shape, dtype)
    assert_near(ours, reference, steps=STEPS_OF_BYTES if dtype == INT8 else STEPS)


@KINDS
@pytest.mark.parametrize(
    "shape",
    [
        shape_of(3, 3, 64, 16),
        shape_of(2, 4, 128, 64),
        shape_of(2, 1, 80, 3),
        shape_of(1, 8, 24, 1, window=70),
        shape_of(1, 2, 32, 512, window=33),
        shape_of(1, 70, 16, 4),
        shape_of(1, 5, 8, 16),
    ],
    ids=str,
)
def test_decoding_rows_read_all_their_keys(shape: Shape, dtype: torch.dtype) -> None:
    check(shape, [(start, 1) for start in (0, 15, 63, 64, 200, 255, 256, 1100)], dtype)


@KINDS
@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        (shape_of(1, 4, 128, 64), [(0, 37), (130, 16)]),
        (shape_of(2, 3, 64, 16), [(65, 140), (0, 1), (250, 70)]),
        (shape_of(1, 32, 16, 16), [(20, 18)]),
        (shape_of(2, 1, 24, 3), [(0, 130), (127, 3)]),
        (shape_of(1, 2, 32, 4, window=25), [(90, 183), (300, 5)]),
        (shape_of(1, 1, 40, 16, window=1), [(3, 70)]),
    ],
    ids=str,
)
def test_a_token_of_a_chunk_reads_up_to_itself(
    shape: Shape, columns: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    check(shape, columns, dtype)


@KINDS
@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize("page_size", [16, 1])
def test_a_node_of_a_tree_reads_its_ancestors_beside_rows_without_trees(
    page_size: int, window: int | None, dtype: torch.dtype
) -> None:
    columns = [(70, 8), (0, 13), (33, 1), (61, 5), (9, 1), (250, 70)]
    check(shape_of(1, 3, 48, page_size, window), columns, dtype, trees=(0, 1, 4, 5))


@KINDS
@pytest.mark.parametrize(("length", "page_size", "topk", "depth"), [(10, 4, 4, 5), (103, 64, 3, 2), (510, 16, 8, 4)])
def test_a_branch_reads_the_prefix_and_its_own_slots(
    length: int, page_size: int, topk: int, depth: int, dtype: torch.dtype
) -> None:
    shifts = [(length, branch * (depth + 1)) for branch in range(topk)]
    check(shape_of(2, 2, 16, page_size), [(length + depth - 1, 1)] * topk, dtype, shifts=shifts)


def test_shifts_need_not_be_whole_pages() -> None:
    check(shape_of(1, 3, 48, 64), [(70, 3), (9, 5), (20, 1)], FP32, shifts=[(69, 5), (0, 131), (400, 64)])


@KINDS
@pytest.mark.parametrize("num_partials", [0, None], ids=["one after the other", "spans apart"])
@pytest.mark.parametrize(
    ("shape", "columns", "how"),
    [
        (shape_of(2, 4, 64, 16), [(start, 1) for start in (0, 63, 255, 256, 1100)], {}),
        (shape_of(1, 3, 24, 1, window=70), [(5, 1), (330, 90)], {}),
        (shape_of(1, 3, 48, 16), [(70, 8), (0, 13), (250, 70)], {"trees": (0, 1, 2)}),
        (shape_of(2, 2, 16, 16), [(513, 1)] * 4, {"shifts": [(510, branch * 5) for branch in range(4)]}),
    ],
    ids=["decode", "window", "trees", "branches"],
)
def test_a_sink_joins_the_sum_of_weights_once(
    shape: Shape, columns: list[tuple[int, int]], how: dict[str, Any], num_partials: int | None, dtype: torch.dtype
) -> None:
    sinks = torch.linspace(-3, 3, shape.num_kv_heads * shape.group)  # some weigh more than all keys, some nothing
    sinks[0], sinks[-1] = -60.0, 25.0
    batch = make(shape, columns, CPU, **how)
    ours, reference = both(batch, shape, dtype, 2, num_partials, sinks=sinks)
    assert_near(ours, reference, steps=STEPS_OF_BYTES if dtype == INT8 else STEPS)
    again, _ = both(batch, shape, dtype, 1, None if num_partials == 0 else 0, sinks=sinks)
    assert torch.equal(again, ours)


def test_segments_of_no_width_are_left_out() -> None:
    shape = shape_of(1, 2, 16, 4)
    batch = make(shape, [(5, 1), (7, 3), (2, 2)], CPU)
    query_lens = batch.segments.query_lens.clone()
    query_lens[0] = 0
    ours, reference = both(replace(batch, segments=replace(batch.segments, query_lens=query_lens)), shape)
    assert_near(ours[1:], reference[1:], steps=STEPS)


def test_layers_of_several_books_read_in_turn() -> None:
    small, large = shape_of(1, 2, 16, 4, window=20), shape_of(2, 4, 128, 16)
    books = [
        (shape, make(shape, columns, CPU, trees=trees))
        for shape, columns, trees in ((small, [(30, 2), (5, 9)], ()), (large, [(300, 2), (70, 40)], (1,)))
    ]
    attention, reads = team_of(2), []
    for shape, batch in books:
        how = {"page_size": shape.page_size, "window": shape.window}
        reads.append(reader(attention, LayerKv(batch.keys, batch.values, None), batch.table, batch.segments, **how))
    for _ in range(3):
        for (shape, batch), read in zip(books, reads, strict=True):
            ours = read(batch.query, LayerKv(batch.keys, batch.values, None))
            assert_near(ours, both(batch, shape)[1], steps=STEPS)


@KINDS
def test_what_is_no_number_is_seen_by_those_who_read_it_and_by_nobody_else(dtype: torch.dtype) -> None:
    shape = shape_of(1, 3, 32, 4)
    batch = make(shape, [(60, 30), (40, 5)], CPU, trees=(1,))
    row = int(batch.segments.rows[0])
    for part, position in ((batch.keys, 70), (batch.values, 80)):
        part[int(batch.table[row, position // 4]) * 4 + position % 4, 0, 7] = torch.nan
    ours, _ = both(batch, shape, dtype)
    assert not ours[:10].isnan().any() and ours[10:30].isnan().flatten(1).any(dim=1).all()
    assert not ours[30:].isnan().any()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.builds(
        Shape,
        num_kv_heads=st.integers(1, 3),
        group=st.sampled_from((1, 2, 3, 4, 7, 8)),
        head_dim=st.sampled_from((4, 16, 24, 40, 64, 80, 128)),
        page_size=st.sampled_from((1, 3, 16, 64)),
        dtype=st.just(FP32),
        window=st.sampled_from((None, 2, 17, 100)),
    ),
    columns=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 80)), min_size=1, max_size=4),
    dtype=st.sampled_from((FP32, FP16, INT8)),
    num_partials=st.sampled_from((0, 500, None)),
    seed=st.integers(0, 99),
)
def test_any_batch_equals_the_reference(
    shape: Shape, columns: list[tuple[int, int]], dtype: torch.dtype, num_partials: int | None, seed: int
) -> None:
    random = Random(seed)
    trees = tuple(number for number in range(len(columns)) if random.random() < 0.4)
    batch = make(shape, columns, CPU, seed=seed, trees=trees)
    ours, reference = both(batch, shape, dtype, random.randint(1, 3), num_partials)
    assert_near(ours, reference, steps=STEPS_OF_BYTES if dtype == INT8 else STEPS)
