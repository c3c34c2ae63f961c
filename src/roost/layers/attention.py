"""Attention over paged KV, the torch reference for a ragged batch; every other backend is checked against it.

A token at position p reads [0, p], or (p - window, p] in a window layer: the window counts the token itself. A tree's
node reads what is before the tree, and its own ancestors. Which slots each row reads is worked out once a step
(`plan_reads`) and used in every layer. What is gathered grows with the live length, never with the row's width; how a
row is padded depends on its own length alone, so its result does not depend on the rows beside it. Called by exec.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# (layer, query, key, value) of the flat batch -> what the heads read: the model's one way to its KV
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

_GATHER_MAX = 2048  # slots of several rows gathered at a time: what a core's cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How the tokens of a span hang together, where they are not a plain sequence."""

    depths: tuple[int, ...]  # [width] position of each token, less the span's start; the root's is 0
    sees: Tensor  # [width, width] bool: which tokens of the span each one reads, itself included


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row's tokens: where they lie in the flat batch, and in which slots of the row."""

    row: int
    offset: int  # flat tokens [offset, offset + width)
    width: int
    start: int  # slots [start, start + width) of the row; also their positions, without a tree
    tree: Tree | None = None

    @property
    def end(self) -> int:
        """First slot past the tokens: the row's live length once they are written."""
        return self.start + self.width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """Rows whose attention is one operation: decoding ones of like length, or a single longer span."""

    tokens: Tensor | slice  # their places in the flat batch
    slots: Tensor  # [num_rows * num_keys]
    mask: Tensor | None  # [num_rows, 1, 1, num_keys], or [width, num_keys]; None: plainly causal
    num_rows: int
    width: int  # tokens of each row


def first_read(start: int, window: int | None) -> int:
    """First position that a token at `start`, or any after it, reads."""
    return 0 if window is None else max(0, start - window + 1)


def plan_reads(table: Tensor, spans: Sequence[Span], *, page_size: int, window: int | None) -> list[Read]:
    """What a step's rows read through a book's table [num_rows, pages_per_row]."""
    reads: list[Read] = []
    groups: dict[int, list[Span]] = {}  # decoding rows, by how many keys they are padded to
    for span in spans:
        if span.width > 1 or span.tree is not None:
            reads.append(_long_read(table, span, page_size, window))
        else:
            groups.setdefault(_padded(span.end - first_read(span.start, window)), []).append(span)
    for num_keys, group in groups.items():
        at_once = max(1, _GATHER_MAX // num_keys)
        for i in range(0, len(group), at_once):
            reads.append(_short_read(table, group[i : i + at_once], num_keys, page_size, window))
    return reads


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, reads: Sequence[Read], *, scale: float) -> Tensor:
    """What the heads [num_tokens, num_heads, head_dim] read from slots [num_slots, num_kv_heads, head_dim]."""
    if len(reads) == 1:
        return _attend(query, keys, values, reads[0], scale)
    output = torch.empty_like(query)
    for read in reads:
        output[read.tokens] = _attend(query[read.tokens], keys, values, read, scale)
    return output


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, start: int, first: int, window: int | None, scale: float
) -> Tensor:
    """Attention of one dense row, plainly written: queries from position `start` on, keys from position `first` on."""
    num_tokens, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    groups = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", groups, key) * scale
    at = torch.arange(start, start + num_tokens, device=query.device)[:, None]
    of = torch.arange(first, first + num_keys, device=query.device)[None, :]
    unseen = of > at if window is None else (of > at) | (of <= at - window)
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, value).reshape(num_tokens, num_heads, head_dim)


def _padded(num_keys: int) -> int:
    """Keys that a row of `num_keys` is padded to: an eighth more at most, from 512 on."""
    step = 64
    while num_keys > 8 * step:
        step *= 2
    return -(-num_keys // step) * step


def _short_read(table: Tensor, spans: list[Span], num_keys: int, page_size: int, window: int | None) -> Read:
    """One token in each of several rows."""
    device = table.device
    rows = torch.tensor([span.row for span in spans], device=device)[:, None]
    lasts = torch.tensor([span.start for span in spans], device=device)[:, None]
    firsts = torch.tensor([first_read(span.start, window) for span in spans], device=device)[:, None]
    at = firsts + torch.arange(num_keys, device=device)  # [num_rows, num_keys]
    live = torch.minimum(at, lasts)  # the padding reads the last token again, without weight
    mask = torch.zeros(at.shape, device=device).masked_fill_(at > lasts, -torch.inf)
    return Read(
        tokens=torch.tensor([span.offset for span in spans], device=device),
        slots=_slots(table, rows, live, page_size).flatten(),
        mask=mask[:, None, None],
        num_rows=len(spans),
        width=1,
    )


def _long_read(table: Tensor, span: Span, page_size: int, window: int | None) -> Read:
    """Several tokens of one row."""
    device, first = table.device, first_read(span.start, window)
    slots = torch.arange(first, span.end, device=device)
    mask = None
    if first or span.start or window is not None or span.tree is not None:
        mask = torch.zeros((span.width, len(slots)), device=device)
        mask.masked_fill_(~_seen(span, slots, window), -torch.inf)
    return Read(
        tokens=slice(span.offset, span.offset + span.width),
        slots=_slots(table, torch.tensor(span.row, device=device), slots, page_size),
        mask=mask,
        num_rows=1,
        width=span.width,
    )


def _seen(span: Span, slots: Tensor, window: int | None) -> Tensor:
    """Which slots each token of a span reads: [width, num_slots]. Windows go by positions, not by slots."""
    depths = range(span.width) if span.tree is None else span.tree.depths
    at = span.start + torch.tensor(list(depths), device=slots.device)  # [width]
    is_before = slots < span.start
    of = slots.clone()
    of[~is_before] = at
    if span.tree is None:
        seen = of <= at[:, None]
    else:
        seen = is_before.repeat(span.width, 1)
        seen[:, ~is_before] = span.tree.sees.to(slots.device)
    return seen if window is None else seen & (of > at[:, None] - window)


def _slots(table: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    return table[rows, positions // page_size].to(torch.int64) * page_size + positions % page_size


def _attend(query: Tensor, keys: Tensor, values: Tensor, read: Read, scale: float) -> Tensor:
    """One operation: [num_rows * width, num_heads, head_dim], in the order of the rows."""
    _, num_kv_heads, head_dim = keys.shape
    key, value = (each.index_select(0, read.slots).unflatten(0, (read.num_rows, -1)) for each in (keys, values))
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [num_rows, num_kv_heads, num_keys, head_dim]
    mask = None if read.mask is None else read.mask.to(query.dtype)
    if read.width == 1:  # the heads that share keys stand in for a sequence
        heads = query.reshape(read.num_rows, num_kv_heads, -1, head_dim)
        mixed = scaled_dot_product_attention(heads, key, value, attn_mask=mask, scale=scale)
        return mixed.reshape(query.shape)
    heads = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [num_kv_heads, shared, width, head_dim]
    key, value = (each.transpose(0, 1).expand(-1, heads.shape[1], -1, -1) for each in (key, value))
    mixed = scaled_dot_product_attention(heads, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return mixed.permute(2, 0, 1, 3).reshape(query.shape)
