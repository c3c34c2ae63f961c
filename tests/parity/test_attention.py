"""Paged attention equals dense attention, and reaches for no page or slot that holds nothing it may read."""

import pytest
import torch

from roost.layers import attention
from roost.layers.attention import causal_attention, paged_attention, plan_reads
from roost.layers.quantised_kv import CODE_DTYPES, dequantise, quantise
from tests.support.segments import make_segments

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8
SCALE = 0.3
NOWHERE = 10**6  # a page id past every pool: gathering it raises
ROWS = ((0, 11), (6, 1), (13, 4), (31, 1), (16, 16))  # (start, width) of each row's tokens


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_paged_attention_equals_dense_and_reads_only_what_is_live(page_size: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(page_size)
    num_pages = 1 + sum(-(-(start + width) // page_size) for start, width in ROWS)
    free_pages = (1 + torch.randperm(num_pages - 1, generator=generator)).tolist()
    keys, values = torch.full((2, num_pages * page_size, NUM_KV_HEADS, HEAD_DIM), torch.nan)
    table = torch.full((len(ROWS), 64), NOWHERE, dtype=torch.int32)
    queries, dense = [], []
    for row, (start, width) in enumerate(ROWS):
        end = start + width
        query = torch.randn((width, NUM_HEADS, HEAD_DIM), generator=generator)
        key, value = torch.randn((2, end, NUM_KV_HEADS, HEAD_DIM), generator=generator)
        queries.append(query)
        dense.append(causal_attention(query, key, value, start=start, first=0, window=window, scale=SCALE))
        for position in range(0 if window is None else max(0, start - window + 1), end):
            index = position // page_size
            if table[row, index] == NOWHERE:
                table[row, index] = free_pages.pop()
            slot = int(table[row, index]) * page_size + position % page_size
            keys[slot], values[slot] = key[position], value[position]
    starts, widths = zip(*ROWS, strict=True)
    segments = make_segments(range(len(ROWS)), starts, widths, are_rounds=False)
    reads = plan_reads(table, segments, page_size=page_size, window=window, head_dim=HEAD_DIM)
    paged = paged_attention(torch.cat(queries), keys, values, reads, scale=SCALE)
    torch.testing.assert_close(paged, torch.cat(dense))


def test_a_sink_joins_the_sum_of_weights_in_chunks_rounds_and_trees_and_keeps_their_bits() -> None:
    generator = torch.Generator().manual_seed(5)
    sinks = torch.linspace(-4, 20, NUM_HEADS)
    keys, values = torch.randn((2, 1024, NUM_KV_HEADS, HEAD_DIM), generator=generator)
    query = torch.randn((700, NUM_HEADS, HEAD_DIM), generator=generator)
    table = torch.arange(256, dtype=torch.int32)[None]  # slot = position
    chain = (torch.arange(3)[None], torch.ones(3, 3, dtype=torch.bool).tril()[None])
    for window in (None, 40):
        dense = causal_attention(
            query, keys[:700], values[:700], start=0, first=0, window=window, scale=SCALE, sinks=sinks
        )
        where = {"page_size": 4, "window": window, "head_dim": HEAD_DIM}
        whole = plan_reads(table, make_segments([0], [0], [700], are_rounds=False), **where)
        read = paged_attention(query, keys, values, whole, scale=SCALE, sinks=sinks)
        torch.testing.assert_close(read, dense)
        for start, width, trees in ((699, 1, None), (600, 3, chain), (130, 3, None)):
            own = query[start : start + width]
            part = plan_reads(table, make_segments([0], [start], [width], trees=trees), **where)
            found = paged_attention(own, keys, values, part, scale=SCALE, sinks=sinks)
            assert torch.equal(found, read[start : start + width])


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_sink_is_the_same_as_a_column_of_its_own(has_mask: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    heads, key, value = torch.randn((3, 2, 3, 20, HEAD_DIM), generator=generator)
    mask = torch.zeros(2, 1, 20, 20).masked_fill_(torch.rand((2, 1, 20, 20), generator=generator) > 0.7, -torch.inf)
    mask[..., 0] = 0.0
    args = (heads, key, value, mask if has_mask else None, SCALE, torch.linspace(-4, 9, 60).view(3, 20))
    torch.testing.assert_close(attention._mixed(*args), attention._mixed_beside_column(*args))


@pytest.mark.parametrize("codes", CODE_DTYPES.values(), ids=CODE_DTYPES)
def test_quantised_keys_and_values_are_read_with_their_own_scales(codes: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn((9, NUM_HEADS, HEAD_DIM), generator=generator)
    sizes = torch.tensor([1.0, 30.0])[:, None, None, None]  # values are much larger than keys
    keys, values = torch.randn((2, 32, NUM_KV_HEADS, HEAD_DIM), generator=generator) * sizes
    (key_codes, key_scales), (value_codes, value_scales) = quantise(keys, codes), quantise(values, codes)
    table = torch.tensor([[3, 1, 6, 2, 5, 7, 4]], dtype=torch.int32)
    segments = make_segments([0, 0], [0, 20], [8, 1], are_rounds=False)  # a chunk, and a row that decodes
    reads = plan_reads(table, segments, page_size=4, window=None, head_dim=HEAD_DIM)
    scales = torch.stack([key_scales.t(), value_scales.t()], dim=1)
    ours = paged_attention(query, key_codes, value_codes, reads, scale=SCALE, scales=scales)
    read = (dequantise(key_codes, key_scales, torch.float32), dequantise(value_codes, value_scales, torch.float32))
    assert torch.equal(ours, paged_attention(query, *read, reads, scale=SCALE))


@pytest.mark.parametrize("window", [None, 2, 3, 6, 100])
@pytest.mark.parametrize("start", [0, 1, 9])
def test_a_node_of_a_tree_reads_its_ancestors_and_what_is_before_the_tree(start: int, window: int | None) -> None:
    parents = (-1, 0, 0, 1, 1, 2, 3, 6)  # node 0 is the root
    paths = [[0]]
    for node, parent in enumerate(parents[1:], 1):
        paths.append([*paths[parent], node])
    sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, path in enumerate(paths):
        sees[node, path] = True
    depths = torch.tensor([len(path) - 1 for path in paths])
    generator = torch.Generator().manual_seed(start)
    end = start + len(parents)
    query = torch.randn((len(parents), NUM_HEADS, HEAD_DIM), generator=generator)
    keys, values = torch.randn((2, 64, NUM_KV_HEADS, HEAD_DIM), generator=generator)
    table = torch.arange(16, dtype=torch.int32)[None]  # slot = position
    segments = make_segments([0], [start], [len(parents)], trees=(depths[None], sees[None]))
    reads = plan_reads(table, segments, page_size=4, window=window, head_dim=HEAD_DIM)
    paged = paged_attention(query, keys, values, reads, scale=SCALE)
    for node, path in enumerate(paths):  # as if its path were the whole sequence
        slots = torch.tensor([*range(start), *(start + each for each in path)])
        alone = causal_attention(
            query[node : node + 1],
            keys[slots],
            values[slots],
            start=len(slots) - 1,
            first=0,
            window=window,
            scale=SCALE,
        )
        torch.testing.assert_close(paged[node : node + 1], alone)
    assert end <= 64


def test_a_decoding_row_is_bit_equal_whatever_rows_are_beside_it() -> None:
    generator = torch.Generator().manual_seed(3)
    keys, values = torch.randn((2, 4096, NUM_KV_HEADS, HEAD_DIM), generator=generator)
    table = torch.stack([torch.randperm(256, generator=generator) for _ in range(12)]).to(torch.int32)
    lengths = torch.randint(1, 4000, (12,), generator=generator).tolist()
    lengths[3:7] = [70, 90, 100, 128]  # some share an operation
    query = torch.randn((12, NUM_HEADS, HEAD_DIM), generator=generator)
    segments = make_segments(range(12), [length - 1 for length in lengths])
    together = paged_attention(
        query, keys, values, plan_reads(table, segments, page_size=16, window=None, head_dim=HEAD_DIM), scale=SCALE
    )
    for row, length in enumerate(lengths):
        reads = plan_reads(table, make_segments([row], [length - 1]), page_size=16, window=None, head_dim=HEAD_DIM)
        alone = paged_attention(query[row : row + 1], keys, values, reads, scale=SCALE)
        assert torch.equal(alone, together[row : row + 1]), length


# rows that decode, on both sides of how many slots are gathered at a time and of where their padding gets coarser
@pytest.mark.parametrize("ends", [(64,) * 33, (65,) * 17, (512, 513), (1024,) * 3, (2048, 2049, 3), (1, 2, 3) * 24])
@pytest.mark.parametrize("width", [1, 3])
def test_any_number_of_rounds_of_any_length_read_all_their_keys(ends: tuple[int, ...], width: int) -> None:
    generator = torch.Generator().manual_seed(len(ends))
    number = torch.arange(width)
    ends = tuple(end + width - 1 for end in ends)
    offsets = [sum(ends[:row]) for row in range(len(ends))]  # a page is one slot
    table = torch.zeros(len(ends), max(ends), dtype=torch.int32)
    keys, values = torch.randn((2, sum(ends), NUM_KV_HEADS, HEAD_DIM), generator=generator)
    query = torch.randn((len(ends) * width, NUM_HEADS, HEAD_DIM), generator=generator)
    dense = []
    for row, (end, offset) in enumerate(zip(ends, offsets, strict=True)):
        table[row, :end] = torch.arange(offset, offset + end)
        start, at = end - width, row * width
        own = (each[offset : offset + end] for each in (keys, values))
        dense.append(causal_attention(query[at : at + width], *own, start=start, first=0, window=None, scale=SCALE))
    chains = (number.expand(len(ends), -1), (number <= number[:, None]).expand(len(ends), -1, -1))
    starts = [end - width for end in ends]
    segments = make_segments(range(len(ends)), starts, [width] * len(ends), trees=None if width == 1 else chains)
    reads = plan_reads(table, segments, page_size=1, window=None, head_dim=HEAD_DIM)
    torch.testing.assert_close(paged_attention(query, keys, values, reads, scale=SCALE), torch.cat(dense))
