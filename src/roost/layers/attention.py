"""Attention over paged KV, the torch reference: a loop over the rows of a ragged batch.

A token at position p reads [0, p], or (p - window, p] in a window layer: the window counts the token itself. Only pages
that hold such positions are gathered, never the row's width. Writes nothing. Called by exec, with KV already in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# (layer, query, key, value) of the flat batch -> what the heads read: the model's one way to its KV
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row's tokens: where they lie in the flat batch, and at which positions of the row."""

    row: int
    offset: int  # flat tokens [offset, offset + width)
    width: int
    start: int  # positions [start, start + width)

    @property
    def end(self) -> int:
        """First position past the tokens: the row's live length once they are written."""
        return self.start + self.width


def first_read(start: int, window: int | None) -> int:
    """First position that a token at `start`, or any after it, reads."""
    return 0 if window is None else max(0, start - window + 1)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, start: int, first: int, window: int | None, scale: float
) -> Tensor:
    """Attention of one row: queries from position `start` on, keys and values from position `first` on."""
    num_tokens, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    groups = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", groups, key) * scale
    at = torch.arange(start, start + num_tokens, device=query.device)[:, None]
    of = torch.arange(first, first + num_keys, device=query.device)[None, :]
    unseen = of > at if window is None else (of > at) | (of <= at - window)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, value).reshape(num_tokens, num_heads, head_dim)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    keys: Tensor,  # [num_pages * page_size, num_kv_heads, head_dim]
    values: Tensor,  # the same
    table: Tensor,  # [num_rows, pages_per_row] page ids
    spans: Sequence[Span],
    *,
    page_size: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """Attention of a ragged batch, each row through its own pages: [num_tokens, num_heads, head_dim]."""
    key_pages = keys.unflatten(0, (-1, page_size))
    value_pages = values.unflatten(0, (-1, page_size))
    outputs = []
    for span in spans:
        first = first_read(span.start, window)
        first_page = first // page_size
        pages = table[span.row, first_page : -(-span.end // page_size)]
        live = slice(first - first_page * page_size, span.end - first_page * page_size)
        outputs.append(
            causal_attention(
                query[span.offset : span.offset + span.width],
                key_pages[pages].flatten(0, 1)[live],
                value_pages[pages].flatten(0, 1)[live],
                start=span.start,
                first=first,
                window=window,
                scale=scale,
            )
        )
    return torch.cat(outputs)
