"""Attention over paged KV, the torch reference for a ragged batch; every other backend is checked against it.

A token at position p reads [0, p], or (p - window, p] in a window layer: the window counts the token itself. A tree's
node reads what is before the tree, and its own ancestors; a draft branch reads the prefix and its own pages. Which
slots each row reads is worked out once a step and used in every layer. What is gathered grows with the live length,
never with the row's width. Every token's keys are summed in one order: by position, in blocks that begin at multiples
of `KEY_BLOCK`, padded to shapes that give the same bits (`layers.batch_invariance`). So a token's result is bit for bit
the same in a chunk of any length, in a round of any width, in a tree and alone. Called by attention backends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from roost.layers.batch_invariance import KEY_BLOCK, AttentionPadding, attention_padding, padded_rows
from roost.layers.rotary import CosSin
from roost.spec_shape import Branches

# (layer, queries and keys side by side, values, cos and sin) of the flat batch, before rotation -> what the heads read.
# The model's one way to the KV cache.
Attend = Callable[[int, Tensor, Tensor, CosSin], Tensor]

_GATHER_MAX = 2048  # slots of several rows gathered at a time: what a core's cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How the tokens of a round hang together, where they are not a plain sequence."""

    depths: Tensor  # [width] position of each token, less the span's start; the root's is 0
    sees: Tensor  # [width, width] bool: which tokens of the span each one reads, itself included


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One row's tokens: where they lie in the flat batch, and in which slots of the row."""

    row: int
    offset: int  # flat tokens [offset, offset + width)
    width: int
    start: int  # slots [start, start + width) of the row; also their positions, without a tree
    is_round: bool = False  # read together with others of its width; else a chunk, if it has several tokens
    tree: Tree | None = None  # of a round

    @property
    def end(self) -> int:
        """First slot past the tokens: the row's live length once they are written."""
        return self.start + self.width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """Rows whose attention is one operation: rounds of like length, nodes of trees, or a single chunk."""

    tokens: Tensor | slice  # their places in the flat batch; a slice: one chunk
    slots: Tensor  # [num_rows * num_keys]
    mask: Tensor | None  # [num_rows, 1, width, num_keys], or [rows, num_keys] of a chunk; None: plainly causal
    num_rows: int
    width: int  # tokens of each row
    rows: int  # queries are padded to a multiple of it


def first_read(start: int, window: int | None) -> int:
    """First position that a token at `start`, or any after it, reads."""
    return 0 if window is None else max(0, start - window + 1)


def plan_reads(
    table: Tensor, spans: Sequence[Span], *, page_size: int, window: int | None, head_dim: int
) -> list[Read]:
    """What a step's rows read through a book's table [num_rows, pages_per_row]."""
    padding = attention_padding(head_dim)
    reads: list[Read] = []
    groups: dict[tuple[int, int, bool], list[Span]] = {}  # rounds, by width, keys they are padded to, and kind
    for span in spans:
        if span.width > 1 and not span.is_round:
            reads.append(_chunk_read(table, span, page_size, window, padding))
        else:
            num_keys = padding.keys_for(span.end - _first_key(span.start, window))
            groups.setdefault((span.width, num_keys, span.tree is not None), []).append(span)
    for (width, num_keys, are_trees), group in groups.items():
        if are_trees:
            for part in _at_once(len(group), num_keys * width):
                for nodes in _at_once(width, num_keys):
                    reads.append(_tree_read(table, group[part], nodes, num_keys, page_size, window, padding))
        else:
            for part in _at_once(len(group), num_keys):
                reads.append(_round_read(table, group[part], num_keys, page_size, window, padding))
    return reads


def plan_branch_reads(
    table: Tensor, rows: Sequence[int], branches: Sequence[Branches], step: int, *, page_size: int, head_dim: int
) -> list[Read]:
    """What the K branches of each row read at a draft step: the prefix's whole pages, then the branch's own.

    The flat batch holds K tokens of each row, in order. Positions before `length` on a branch's own pages are copies.
    """
    padding = attention_padding(head_dim)
    reads: list[Read] = []
    groups: dict[int, list[int]] = {}  # rows, by how many keys they are padded to
    for i, each in enumerate(branches):
        groups.setdefault(padding.keys_for(each.base + each.topk * (each.last + step + 1)), []).append(i)
    for num_keys, group in groups.items():
        for part in _at_once(len(group), num_keys):
            reads.append(_branch_read(table, rows, branches, group[part], step, num_keys, page_size, padding))
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


def _first_key(start: int, window: int | None) -> int:
    """First key that is laid out for a token at `start`: blocks of keys begin at the same positions for everybody."""
    return first_read(start, window) // KEY_BLOCK * KEY_BLOCK


def _at_once(num_rows: int, num_keys: int) -> list[slice]:
    """Pieces of a group that are one operation each."""
    at_once = max(1, _GATHER_MAX // num_keys)
    return [slice(first, first + at_once) for first in range(0, num_rows, at_once)]


def _round_read(
    table: Tensor, spans: list[Span], num_keys: int, page_size: int, window: int | None, padding: AttentionPadding
) -> Read:
    """One token in each of several rows, or a chain of them in each."""
    device, width = table.device, spans[0].width
    rows, starts, firsts, at = _keys_of(table, spans, num_keys, window)  # [num_rows, 1], and [num_rows, num_keys]
    live = at.clamp(firsts, starts + width - 1)  # the padding reads a token again, without weight
    positions = starts + torch.arange(width, device=device)  # [num_rows, width]
    offsets = torch.tensor([span.offset for span in spans], device=device)
    return Read(
        tokens=offsets if width == 1 else (offsets[:, None] + torch.arange(width, device=device)).flatten(),
        slots=_slots(table, rows, live, page_size).flatten(),
        mask=_mask(_seen(at[:, None], positions[:, :, None], window))[:, None],
        num_rows=len(spans),
        width=width,
        rows=padding.rows,
    )


def _tree_read(
    table: Tensor,
    spans: list[Span],
    nodes: slice,
    num_keys: int,
    page_size: int,
    window: int | None,
    padding: AttentionPadding,
) -> Read:
    """Some nodes of trees, each as a row of its own: it reads what is before the tree, then its path from the root.

    So its keys are in the order of their positions, as they are when the path has become plain text.
    """
    device, width = table.device, spans[0].width
    rows, starts, firsts, at = (each[:, None] for each in _keys_of(table, spans, num_keys, window))
    trees = [span.tree for span in spans if span.tree is not None]
    depths = torch.stack([tree.depths for tree in trees])  # [num_rows, width]
    sees = torch.stack([tree.sees for tree in trees])
    paths = torch.where(sees, depths[:, None], width).argsort(dim=-1, stable=True)  # nodes from the root on
    paths, positions = paths[:, nodes], (starts + depths[:, :, None])[:, nodes]  # [num_rows, num_nodes, …]
    at = at.expand(-1, positions.shape[1], -1)
    live = torch.minimum(at.clamp(min=firsts), positions)
    on_path = starts + paths.gather(2, (live - starts).clamp(min=0))
    places = torch.where(live < starts, live, on_path)
    offsets = torch.tensor([span.offset for span in spans], device=device)
    return Read(
        tokens=(offsets[:, None] + torch.arange(width, device=device)[nodes]).flatten(),
        slots=_slots(table, rows, places, page_size).flatten(),
        mask=_mask(_seen(at, positions, window)).flatten(0, 1)[:, None, None],
        num_rows=len(spans) * positions.shape[1],
        width=1,
        rows=padding.rows,
    )


def _keys_of(
    table: Tensor, spans: list[Span], num_keys: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, starts and first reads [num_rows, 1] of rounds, and the positions [num_rows, num_keys] of their keys."""
    columns = [(span.row, span.start, first_read(span.start, window), _first_key(span.start, window)) for span in spans]
    row, start, first, first_key = torch.tensor(columns, device=table.device)[:, :, None].unbind(1)
    return row, start, first, first_key + torch.arange(num_keys, device=table.device)


def _seen(of: Tensor, at: Tensor, window: int | None) -> Tensor:
    """Whether a token at position `at` reads a key of position `of`."""
    return of <= at if window is None else (of <= at) & (of > at - window)


def _branch_read(
    table: Tensor,
    rows: Sequence[int],
    branches: Sequence[Branches],
    group: list[int],
    step: int,
    num_keys: int,
    page_size: int,
    padding: AttentionPadding,
) -> Read:
    """A draft step of several rows: the prefix up to `base`, then each branch's own positions, one after the other."""
    device, topk = table.device, branches[0].topk
    columns = [(rows[i], branches[i].base, branches[i].stride, branches[i].last + step + 1) for i in group]
    row, base, stride, own_len = torch.tensor(columns, device=device)[:, :, None].unbind(1)  # [num_rows, 1] each
    at = torch.arange(num_keys, device=device).expand(len(group), -1)
    branch = (at - base).div(own_len, rounding_mode="floor")  # negative in the prefix, `topk` in the padding
    within = (at - base) - branch * own_len
    last = base + own_len - 1  # the padding reads a token of branch 0 again, without weight
    positions = torch.where(branch < 0, at, torch.where(branch < topk, base + branch * stride + within, last))
    seen = (branch < 0)[:, None] | (branch[:, None] == torch.arange(topk, device=device)[None, :, None])
    offsets = torch.tensor(group, device=device) * topk
    return Read(
        tokens=(offsets[:, None] + torch.arange(topk, device=device)).flatten(),
        slots=_slots(table, row, positions, page_size).flatten(),
        mask=_mask(seen)[:, None],
        num_rows=len(group),
        width=topk,
        rows=padding.rows,
    )


def _chunk_read(table: Tensor, span: Span, page_size: int, window: int | None, padding: AttentionPadding) -> Read:
    """Several tokens of one row, one after the other."""
    device, first = table.device, first_read(span.start, window)
    first_key = _first_key(span.start, window)
    of = first_key + torch.arange(padding.keys_for(span.end - first_key), device=device)
    mask = None
    if first_key or span.start or window is not None:
        at = span.start + torch.arange(padded_rows(span.width, padding.rows), device=device)[:, None]
        mask = _mask(_seen(of, at.clamp(max=span.end - 1), window))
    return Read(
        tokens=slice(span.offset, span.offset + span.width),
        slots=_slots(table, torch.tensor(span.row, device=device), of.clamp(first, span.end - 1), page_size),
        mask=mask,
        num_rows=1,
        width=span.width,
        rows=padding.rows,
    )


def _mask(seen: Tensor) -> Tensor:
    """What is added to the scores of keys: nothing, or minus infinity where they are not seen."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _slots(table: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    return table[rows, positions // page_size].to(torch.int64) * page_size + positions % page_size


def _attend(query: Tensor, keys: Tensor, values: Tensor, read: Read, scale: float) -> Tensor:
    """One operation: [num_rows * width, num_heads, head_dim], in the order of the rows."""
    _, num_kv_heads, head_dim = keys.shape
    key, value = (each.index_select(0, read.slots).unflatten(0, (read.num_rows, -1)) for each in (keys, values))
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [num_rows, num_kv_heads, num_keys, head_dim]
    mask = None if read.mask is None else read.mask.to(query.dtype)
    if not isinstance(read.tokens, slice):  # the heads that share keys stand in for a sequence
        shared = query.shape[1] // num_kv_heads
        heads = query.reshape(read.num_rows, read.width, num_kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        heads, num_rows = _padded(heads.flatten(2, 3), read.rows), shared * read.width
        if mask is not None and read.width > 1:  # [num_rows, 1, shared * width, num_keys]
            mask = _padded(mask.repeat(1, 1, shared, 1), read.rows)
        mixed = scaled_dot_product_attention(heads, key, value, attn_mask=mask, scale=scale)[:, :, :num_rows]
        return mixed.unflatten(2, (shared, read.width)).permute(0, 3, 1, 2, 4).reshape(query.shape)
    heads = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [num_kv_heads, shared, width, head_dim]
    heads = _padded(heads, read.rows)
    key, value = (each.transpose(0, 1).expand(-1, heads.shape[1], -1, -1) for each in (key, value))
    mixed = scaled_dot_product_attention(heads, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return mixed[:, :, : read.width].permute(2, 0, 1, 3).reshape(query.shape)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """Rows [..., num_rows, n] padded to a multiple."""
    missing = padded_rows(rows.shape[-2], multiple) - rows.shape[-2]
    return pad(rows, (0, 0, 0, missing)) if missing else rows
