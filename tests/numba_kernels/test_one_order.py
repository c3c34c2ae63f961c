"""A token's attention has the same bits alone, in a chunk, in a round, as a node or a branch, with any neighbours."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from roost.attention.kv_cache import LayerKv
from roost.layers.segments import Segments
from tests.numba_kernels.runs import FP16, FP32, INT8, kept, read, team_of
from tests.support.attention_batches import Batch
from tests.support.segments import make_segments

KINDS = pytest.mark.parametrize("dtype", [FP32, FP16, INT8], ids=["fp32", "fp16", "int8"])
WINDOWS = pytest.mark.parametrize("window", [None, 100])
LENGTH, NUM_ROWS, GROUP = 330, 3, 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Text:
    """Rows of one text each, with the KV of every position and the queries of every token."""

    query: Tensor  # [NUM_ROWS, LENGTH, …]
    layer: LayerKv
    table: Tensor
    page_size: int
    window: int | None

    def read(self, segments: Segments, query: Tensor, size: int = 1, num_partials: int | None = None) -> Tensor:
        how = {"page_size": self.page_size, "window": self.window}
        return read(team_of(size, num_partials), query, self.layer, self.table, segments, **how)

    def piece(self, row: int, start: int, width: int, **how: int | None) -> Tensor:
        """Some tokens of a row, alone."""
        return self.read(make_segments([row], [start], [width]), self.query[row, start : start + width], **how)


def text(dtype: torch.dtype, window: int | None = None, page_size: int = 16, head_dim: int = 64) -> Text:
    generator = torch.Generator().manual_seed(5)
    kv = torch.randn((2, NUM_ROWS, LENGTH, 2, head_dim), generator=generator)
    query = torch.randn((NUM_ROWS, LENGTH, 2 * GROUP, head_dim), generator=generator)
    pages_per_row = -(-(LENGTH + 64) // page_size)
    order = torch.randperm(NUM_ROWS * pages_per_row, generator=generator).to(torch.int32)
    table = order.view(NUM_ROWS, pages_per_row)
    slots = torch.full((2, NUM_ROWS * pages_per_row * page_size, 2, head_dim), torch.nan)
    for row in range(NUM_ROWS):
        slots[:, slots_of(table, page_size, row, torch.arange(LENGTH))] = kv[:, row]
    none = make_segments([0], [0])
    layer, _, _ = kept(Batch(query=query, keys=slots[0], values=slots[1], table=table, segments=none), dtype)
    return Text(query=query, layer=layer, table=table, page_size=page_size, window=window)


def slots_of(table: Tensor, page_size: int, row: int, positions: Tensor) -> Tensor:
    return table[row, positions // page_size].to(torch.int64) * page_size + positions % page_size


@KINDS
@WINDOWS
def test_a_chunk_of_any_cut_and_its_tokens_alone(dtype: torch.dtype, window: int | None) -> None:
    whole = text(dtype, window)
    expected = whole.piece(1, 0, LENGTH)
    for start, width in ((0, 1), (63, 1), (64, 1), (100, 2), (255, 3), (256, 5), (329, 1), (17, 200), (31, 64)):
        assert torch.equal(whole.piece(1, start, width), expected[start : start + width]), (start, width)


@KINDS
def test_any_number_of_threads_and_spans_read_apart_or_one_after_the_other(dtype: torch.dtype) -> None:
    whole = text(dtype)
    expected = whole.piece(0, 300, 30)
    for size, num_partials in ((1, 0), (2, None), (3, 50), (2, 0), (3, 100_000)):
        assert torch.equal(whole.piece(0, 300, 30, size=size, num_partials=num_partials), expected)


@pytest.mark.parametrize("head_dim", [24, 64, 128, 512])
def test_pages_of_any_size(head_dim: int) -> None:
    expected = text(FP32, head_dim=head_dim).piece(2, 290, 40)
    for page_size in (1, 3, 64):
        assert torch.equal(text(FP32, page_size=page_size, head_dim=head_dim).piece(2, 290, 40), expected)


@KINDS
@WINDOWS
def test_any_neighbours(dtype: torch.dtype, window: int | None) -> None:
    whole = text(dtype, window)
    rows, starts, lens = [2, 0, 1, 2], [319, 7, 120, 70], [5, 1, 90, 3]
    query = torch.cat(
        [whole.query[row, start : start + width] for row, start, width in zip(rows, starts, lens, strict=True)]
    )
    together = whole.read(make_segments(rows, starts, lens), query, size=2).split(lens)
    for row, start, width, ours in zip(rows, starts, lens, together, strict=True):
        assert torch.equal(ours, whole.piece(row, start, width))


@KINDS
@WINDOWS
@pytest.mark.parametrize("start", [50, 60, 200, 250, 300])
def test_a_path_of_a_tree_and_the_same_tokens_as_plain_text(start: int, dtype: torch.dtype, window: int | None) -> None:
    whole = text(dtype, window)
    expected = whole.piece(0, start, 6)
    depths = [0, 1, 1, 2, 3, 2, 4, 5, 3]
    path = [0, 2, 5, 8, 6, 7]  # nodes that hold the text's next tokens, one for each depth
    others = [node for node in range(len(depths)) if node not in path]
    depths = [path.index(node) if node in path else depths[node] for node in range(len(depths))]
    mask = torch.eye(len(depths), dtype=torch.bool)
    for number, node in enumerate(path):
        mask[node, path[: number + 1]] = True
    for node in others:  # off the path: they hang on its first nodes
        mask[node, path[: depths[node]]] = True
    tree = replace(whole, layer=moved(whole, start, path), window=window)
    segments = make_segments([0], [start], [len(depths)], trees=(torch.tensor([depths]), mask[None]))
    query = torch.randn((len(depths), *whole.query.shape[2:]), generator=torch.Generator().manual_seed(1))
    query[path] = whole.query[0, start : start + 6]
    assert torch.equal(tree.read(segments, query)[path], expected)


def moved(whole: Text, start: int, places: list[int]) -> LayerKv:
    """The KV with the row's next positions kept at other places of the row, and other tokens' in between."""
    keys, values, scales = (None if each is None else each.clone() for each in whole.layer)
    sources = slots_of(whole.table, whole.page_size, 0, torch.arange(start, start + len(places)))
    dests = slots_of(whole.table, whole.page_size, 0, start + torch.tensor(places))
    others = slots_of(whole.table, whole.page_size, 1, torch.arange(start, start + max(places) + 1))
    own = slots_of(whole.table, whole.page_size, 0, torch.arange(start, start + max(places) + 1))
    for ours, theirs in zip((keys, values), whole.layer[:2], strict=True):
        ours[own] = theirs[others]
        ours[dests] = theirs[sources]
    if scales is not None:
        scales[..., own] = whole.layer.scales[..., others]
        scales[..., dests] = whole.layer.scales[..., sources]
    return LayerKv(keys, values, scales)


@KINDS
@pytest.mark.parametrize("start", [60, 250, 320])
def test_a_draft_branch_and_the_same_tokens_as_plain_text(start: int, dtype: torch.dtype) -> None:
    whole = text(dtype)
    base, shift = start - 4, 19
    places = torch.arange(base, start + 1)
    layer = moved(whole, base, (places - base + shift).tolist())
    segments = make_segments([0], [start])
    segments = replace(segments, branch_bases=torch.tensor([base]), branch_shifts=torch.tensor([shift]))
    ours = replace(whole, layer=layer).read(segments, whole.query[0, start : start + 1])
    assert torch.equal(ours, whole.piece(0, start, 1))
