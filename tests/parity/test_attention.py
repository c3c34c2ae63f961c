"""Paged attention equals dense attention, and reaches for no page or slot that holds nothing it may read."""

import pytest
import torch

from roost.layers.attention import Span, causal_attention, paged_attention

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
    spans, queries, dense = [], [], []
    for row, (start, width) in enumerate(ROWS):
        end = start + width
        query = torch.randn((width, NUM_HEADS, HEAD_DIM), generator=generator)
        key, value = torch.randn((2, end, NUM_KV_HEADS, HEAD_DIM), generator=generator)
        spans.append(Span(row=row, offset=sum(len(each) for each in queries), width=width, start=start))
        queries.append(query)
        dense.append(causal_attention(query, key, value, start=start, first=0, window=window, scale=SCALE))
        for position in range(0 if window is None else max(0, start - window + 1), end):
            index = position // page_size
            if table[row, index] == NOWHERE:
                table[row, index] = free_pages.pop()
            slot = int(table[row, index]) * page_size + position % page_size
            keys[slot], values[slot] = key[position], value[position]
    paged = paged_attention(
        torch.cat(queries), keys, values, table, spans, page_size=page_size, window=window, scale=SCALE
    )
    torch.testing.assert_close(paged, torch.cat(dense))
