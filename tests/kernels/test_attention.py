"""Attention over segments equals its reference: any widths, trees, branches, windows, pages, splits and head sizes."""

from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from roost.attention.kv_cache import LayerKv
from roost.layers.segments import Segments, Tiles, segment_attention, tiles
from roost.models.model import KvShape
from tests.support.attention_batches import NOWHERE, Batch, Shape, make, padded
from tests.support.canaries import DTYPES, SENTINEL, Fenced, assert_near

attention = pytest.importorskip("roost.kernels.attention")
backends = pytest.importorskip("roost.attention.triton_backend")
SCALE = 0.21
BF16, FP16, FP32 = DTYPES


def expected(batch: Batch, shape: Shape, sinks: Tensor | None = None) -> Tensor:
    """The reference's result, with zeros in place of what it must not weigh in."""
    keys, values = batch.keys.nan_to_num(), batch.values.nan_to_num()
    table = batch.table.where(batch.table < NOWHERE, 0)
    how = {"page_size": shape.page_size, "window": shape.window, "scale": SCALE}
    return segment_attention(batch.query, keys, values, table, batch.segments, **how, sinks=sinks)


def arrivals_of(batch: Batch) -> Tensor:
    """Zeros, one for each tile and KV head at least."""
    return torch.zeros(
        len(batch.segments.tile_segments) * batch.query.shape[1], dtype=torch.int32, device=batch.query.device
    )


def check(batch: Batch, shape: Shape, num_splits: int, sinks: Tensor | None = None) -> None:
    """The kernel's result is the reference's, written between canaries."""
    out = Fenced(batch.query.shape, shape.dtype, batch.query.device)
    how = {"page_size": shape.page_size, "window": shape.window, "scale": SCALE, "num_splits": num_splits}
    args = (batch.query, batch.keys, batch.values, batch.table, batch.segments)
    arrivals = arrivals_of(batch)
    ours = attention.paged_attention(*args, **how, arrivals=arrivals, sinks=sinks, out=out.tensor)
    out.check()
    assert not arrivals.any()
    assert_near(ours, expected(batch, shape, sinks), steps=2)


@pytest.mark.parametrize("num_splits", [1, 2, 5])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_kv_heads=2, group=4, head_dim=128, page_size=64, dtype=BF16),
        Shape(num_kv_heads=1, group=3, head_dim=64, page_size=16, dtype=FP16),
        Shape(num_kv_heads=2, group=1, head_dim=80, page_size=3, dtype=FP32),
        Shape(num_kv_heads=1, group=8, head_dim=96, page_size=1, dtype=BF16, window=70),
        Shape(num_kv_heads=1, group=2, head_dim=256, page_size=512, dtype=BF16, window=33),
        Shape(num_kv_heads=1, group=4, head_dim=512, page_size=16, dtype=BF16),
        Shape(num_kv_heads=1, group=5, head_dim=16, page_size=256, dtype=FP32),
    ],
    ids=str,
)
def test_decoding_rows_read_all_their_keys(shape: Shape, num_splits: int, device: torch.device) -> None:
    starts = (0, 63, 64, 200) if num_splits == 1 else (5, 330)
    check(make(shape, [(start, 1) for start in starts], device), shape, num_splits)


@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        (Shape(num_kv_heads=1, group=4, head_dim=128, page_size=64, dtype=BF16, tile_len=16), [(0, 37), (130, 16)]),
        (Shape(num_kv_heads=2, group=3, head_dim=64, page_size=16, dtype=FP16, tile_len=32), [(65, 40), (0, 1)]),
        (Shape(num_kv_heads=1, group=32, head_dim=16, page_size=16, dtype=BF16, tile_len=16), [(20, 18)]),
        (Shape(num_kv_heads=2, group=1, head_dim=24, page_size=3, dtype=FP32, tile_len=64), [(0, 65), (127, 3)]),
        (Shape(num_kv_heads=1, group=2, head_dim=32, page_size=4, dtype=BF16, tile_len=40, window=25), [(90, 83)]),
        (Shape(num_kv_heads=1, group=1, head_dim=16, page_size=16, dtype=FP32, tile_len=5, window=1), [(3, 11)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_token_of_a_chunk_reads_up_to_itself(
    shape: Shape, columns: list[tuple[int, int]], num_splits: int, device: torch.device
) -> None:
    check(make(shape, columns, device), shape, num_splits)


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(("tile_len", "page_size", "dtype"), [(8, 16, BF16), (7, 1, FP32), (32, 64, FP16)])
def test_a_node_of_a_tree_reads_its_ancestors_beside_rows_without_trees(
    tile_len: int, page_size: int, dtype: torch.dtype, window: int | None, device: torch.device
) -> None:
    heads = {"num_kv_heads": 1, "group": 3, "head_dim": 32}
    shape = Shape(**heads, page_size=page_size, dtype=dtype, tile_len=tile_len, window=window)
    batch = make(shape, [(70, 8), (0, 13), (33, 1), (61, 5), (9, 1)], device, trees=(0, 1, 4))
    check(batch, shape, 1 if window is None else 2)


@pytest.mark.parametrize(("length", "page_size", "topk", "depth"), [(10, 4, 4, 5), (103, 64, 3, 2), (126, 64, 8, 4)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_branch_reads_the_prefix_and_its_own_slots(
    length: int, page_size: int, topk: int, depth: int, num_splits: int, device: torch.device
) -> None:
    shape = Shape(num_kv_heads=2, group=2, head_dim=16, page_size=page_size, dtype=FP32)
    shifts = [(length, branch * (depth + 1)) for branch in range(topk)]
    batch = make(shape, [(length + depth - 1, 1)] * topk, device, shifts=shifts)
    check(batch, shape, num_splits)


def test_shifts_need_not_be_whole_pages(device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=3, head_dim=48, page_size=64, dtype=BF16, tile_len=3)
    batch = make(shape, [(70, 3), (9, 5), (20, 1)], device, shifts=[(69, 5), (0, 131), (400, 64)])
    check(batch, shape, 2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_padding_and_segments_of_no_width_write_nothing(num_splits: int, device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=2, head_dim=16, page_size=4, dtype=FP32, tile_len=2)
    batch = make(shape, [(5, 1), (7, 3), (2, 2)], device)
    query_lens = batch.segments.query_lens.clone()
    query_lens[0] = 0  # the device may decide this after the tiles were cut
    segments = padded(replace(batch.segments, query_lens=query_lens), 3)
    how = {"page_size": 4, "window": None, "scale": SCALE, "num_splits": num_splits}
    out = Fenced(batch.query.shape, FP32, device)
    out.tensor.fill_(SENTINEL)
    arrivals = torch.zeros(len(segments.tile_segments), dtype=torch.int32, device=device)
    args = (batch.query, batch.keys, batch.values, batch.table, segments)
    attention.paged_attention(*args, **how, arrivals=arrivals, out=out.tensor)
    out.check()
    assert not arrivals.any()
    assert (out.tensor[0] == SENTINEL).all()
    assert_near(out.tensor[1:], expected(batch, shape)[1:], steps=2)


@pytest.mark.parametrize("num_processors", [1, 132])
def test_chunks_beside_rounds_are_read_in_tiles_of_two_lengths(num_processors: int, device: torch.device) -> None:
    shape = Shape(num_kv_heads=1, group=4, head_dim=32, page_size=16, dtype=FP32, tile_len=4)
    batch = make(shape, [(70, 4), (150, 37), (33, 2), (0, 90), (9, 1)], device, trees=(0,))
    lens = batch.segments.query_lens.cpu().numpy().astype(np.int64)
    narrow, wide = (
        [torch.tensor(each, dtype=torch.int32, device=device) for each in cut] for cut in cut_tiles(lens, 4)
    )
    segments = replace(
        batch.segments,
        tile_segments=narrow[0],
        tile_offsets=narrow[1],
        wide_tiles=Tiles(segments=wide[0], offsets=wide[1], tile_len=32),
    )
    assert len(narrow[0]) == 3 and len(wide[0]) == 2 + 3
    backend = backends.TritonAttention(SimpleNamespace(num_processors=num_processors, torch=device))
    table = SimpleNamespace(pages=batch.table, page_size=16, window=None)
    kv = KvShape(num_kv_heads=1, head_dim=32, scale=SCALE, dtype=FP32)
    read = backend.read(table, segments, kv)
    ours = read(batch.query, LayerKv(batch.keys, batch.values, None))
    assert_near(ours, expected(batch, shape), steps=2)
    assert torch.equal(read(batch.query, LayerKv(batch.keys, batch.values, None)), ours)


def cut_tiles(lens: np.ndarray, tile_len: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tiles of what is as long as one at most, and wide ones of the rest."""
    return [tiles(np.where(lens <= tile_len, lens, 0), tile_len), tiles(np.where(lens > tile_len, lens, 0), 32)]


@pytest.mark.parametrize("num_splits", [1, 5])
@pytest.mark.parametrize(
    ("shape", "columns", "how"),
    [
        (Shape(num_kv_heads=2, group=4, head_dim=64, page_size=16, dtype=BF16), [(330, 1), (0, 1), (63, 1)], {}),
        (Shape(num_kv_heads=1, group=3, head_dim=32, page_size=1, dtype=FP32, window=70), [(5, 1), (330, 1)], {}),
        (Shape(num_kv_heads=1, group=8, head_dim=16, page_size=64, dtype=FP16, tile_len=16), [(130, 37), (0, 9)], {}),
        (
            Shape(num_kv_heads=1, group=3, head_dim=32, page_size=16, dtype=FP32, tile_len=8, window=40),
            [(70, 8), (0, 13), (133, 1), (61, 5)],
            {"trees": (0, 1, 3)},
        ),
        (
            Shape(num_kv_heads=2, group=2, head_dim=16, page_size=4, dtype=FP32),
            [(104, 1)] * 3,
            {"shifts": [(103, branch * 3) for branch in range(3)]},
        ),
    ],
    ids=["decode", "window", "chunk", "trees", "branches"],
)
def test_a_sink_joins_the_sum_of_weights_once(
    shape: Shape, columns: list[tuple[int, int]], how: dict[str, object], num_splits: int, device: torch.device
) -> None:
    num_heads = shape.num_kv_heads * shape.group
    sinks = torch.linspace(-3, 3, num_heads, device=device)  # some weigh more than all keys, some nothing
    sinks[0], sinks[-1] = -60.0, 25.0
    check(make(shape, columns, device, **how), shape, num_splits, sinks)


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=st.builds(
        Shape,
        num_kv_heads=st.integers(1, 2),
        group=st.sampled_from((1, 3, 4)),
        head_dim=st.sampled_from((16, 40, 64)),
        page_size=st.sampled_from((1, 3, 16, 64)),
        dtype=st.sampled_from(DTYPES),
        window=st.sampled_from((None, 2, 17, 100)),
        tile_len=st.sampled_from((1, 4, 16)),
    ),
    columns=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 20)), min_size=1, max_size=3),
    num_splits=st.sampled_from((1, 2, 5)),
    seed=st.integers(0, 99),
)
def test_any_batch_equals_the_reference(
    shape: Shape, columns: list[tuple[int, int]], num_splits: int, seed: int, device: torch.device
) -> None:
    random = Random(seed)
    trees = tuple(number for number in range(len(columns)) if random.random() < 0.4)
    check(make(shape, columns, device, seed=seed, trees=trees), shape, num_splits)


def test_a_graph_reads_lengths_anew_and_nothing_is_compiled_for_them(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are a GPU's")
    shape = Shape(num_kv_heads=2, group=4, head_dim=64, page_size=16, dtype=BF16)
    batch = make(shape, [(200, 1), (90, 1), (333, 1)], device)
    how = {"page_size": 16, "window": None, "scale": SCALE, "num_splits": 3}
    args = (batch.query, batch.keys, batch.values, batch.table)
    how["arrivals"] = arrivals_of(batch)
    attention.paged_attention(*args, batch.segments, **how)
    kernels = attention._attend.device_caches[torch.cuda.current_device()][0]
    num_compiled = len(kernels)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = attention.paged_attention(*args, batch.segments, **how)
    for _ in range(3):
        batch.segments.start_positions.sub_(torch.tensor([61, 17, 1], device=device)).clamp_(min=0)
        graph.replay()
        assert_near(ours, expected(batch, shape), steps=2)
    unaligned = torch.cat([batch.segments.rows[:1], batch.segments.rows])[1:]
    ours = attention.paged_attention(*args, replace(batch.segments, rows=unaligned), **{**how, "num_splits": 16})
    assert_near(ours, expected(batch, shape), steps=2)
    assert len(kernels) == num_compiled


@pytest.mark.parametrize(
    ("num_tiles", "tile_len", "num_tokens", "keys_max", "num_splits"),
    [
        (1, 1, 1, 8192, 32),
        (1, 1, 1, 512, 8),  # one for every 64 keys
        (8, 1, 8, 8192, 4),
        (64, 1, 64, 8192, 1),
        (64, 4, 256, 8192, 1),
        (4, 32, 128, 8192, 4),  # a multiprocessor has room for one program of 128 rows
        (40, 32, 128, 8192, 4),  # of a graph that could need many more
        (512, 32, 128, 8192, 4),
        (513, 32, 128, 8192, 1),  # more than can be counted
        (0, 1, 0, 0, 1),
    ],
)
def test_splits_fill_the_device_and_no_more(
    num_tiles: int, tile_len: int, num_tokens: int, keys_max: int, num_splits: int
) -> None:
    none = torch.zeros(0)
    columns = dict.fromkeys(("rows", "start_positions", "offsets", "query_lens", "tile_offsets"), none)
    segments = Segments(**columns, tile_segments=torch.zeros(num_tiles), tile_len=tile_len)
    query = torch.zeros(num_tokens, 32, 1)
    assert attention.num_splits(segments, query, 8, 132, keys_max) == num_splits
