"""Attention over paged KV, the torch reference for a ragged batch; every other backend is checked against it.

A token at position p reads [0, p], or (p - window, p] in a window layer: the window counts the token itself. A tree's
node reads what is before the tree, and its own ancestors; a draft branch reads the prefix and its own pages. Which
slots each row reads is worked out once a step and used in every layer. What is gathered grows with the live length,
never with the row's width; how a row is padded depends on its own length alone, so its result does not depend on the
rows beside it. Called by exec and spec.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roost.layers.rotary import Turns
from roost.spec.shape import Branches

# (layer, queries and keys side by side, values, turns) of the flat batch, before they turn -> what the heads read: the
# model's one way to its KV
Attend = Callable[[int, Tensor, Tensor, Turns], Tensor]

_GATHER_MAX = 2048  # slots of several rows gathered at a time: what a core's cache holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """How the tokens of a span hang together, where they are not a plain sequence."""

    depths: Tensor  # [width] position of each token, less the span's start; the root's is 0
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
    """Rows whose attention is one operation: decoding ones of like length, or a single chunk."""

    tokens: Tensor | slice  # their places in the flat batch; a slice: one chunk
    slots: Tensor  # [num_rows * num_keys]
    mask: Tensor | None  # [num_rows, 1, width, num_keys], or [width, num_keys] of a chunk; None: plainly causal
    num_rows: int
    width: int  # tokens of each row


def first_read(start: int, window: int | None) -> int:
    """First position that a token at `start`, or any after it, reads."""
    return 0 if window is None else max(0, start - window + 1)


def plan_reads(table: Tensor, spans: Sequence[Span], *, page_size: int, window: int | None) -> list[Read]:
    """What a step's rows read through a book's table [num_rows, pages_per_row]."""
    reads: list[Read] = []
    groups: dict[tuple[int, int], list[Span]] = {}  # decoding rows, by width and by how many keys they are padded to
    for span in spans:
        if span.width > 1 and span.tree is None:
            reads.append(_chunk_read(table, span, page_size, window))
        else:
            num_keys = _padded(span.end - first_read(span.start, window))
            groups.setdefault((span.width, num_keys), []).append(span)
    for (_, num_keys), group in groups.items():
        for part in _at_once(len(group), num_keys):
            reads.append(_round_read(table, group[part], num_keys, page_size, window))
    return reads


def plan_branch_reads(
    table: Tensor, rows: Sequence[int], branches: Sequence[Branches], step: int, *, page_size: int
) -> list[Read]:
    """What the K branches of each row read at a draft step: the prefix's whole pages, then the branch's own.

    The flat batch holds K tokens of each row, in order. Positions before `length` on a branch's own pages are copies.
    """
    reads: list[Read] = []
    groups: dict[int, list[int]] = {}  # rows, by how many keys they are padded to
    for i, each in enumerate(branches):
        groups.setdefault(_padded(each.base + each.topk * (each.last + step + 1)), []).append(i)
    for num_keys, group in groups.items():
        for part in _at_once(len(group), num_keys):
            reads.append(_branch_read(table, rows, branches, group[part], step, num_keys, page_size))
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


def _at_once(num_rows: int, num_keys: int) -> list[slice]:
    """Pieces of a group that are one operation each."""
    at_once = max(1, _GATHER_MAX // num_keys)
    return [slice(first, first + at_once) for first in range(0, num_rows, at_once)]


def _round_read(table: Tensor, spans: list[Span], num_keys: int, page_size: int, window: int | None) -> Read:
    """One token in each of several rows, or the nodes of a tree in each."""
    device, width = table.device, spans[0].width
    rows = torch.tensor([span.row for span in spans], device=device)[:, None]
    starts = torch.tensor([span.start for span in spans], device=device)[:, None]
    firsts = torch.tensor([first_read(span.start, window) for span in spans], device=device)[:, None]
    at = firsts + torch.arange(num_keys, device=device)  # [num_rows, num_keys]
    lasts = starts + width - 1
    live = torch.minimum(at, lasts)  # the padding reads the last token again, without weight
    seen = (at <= lasts)[:, None] if width == 1 else _seen_in_trees(spans, at, starts, window)
    offsets = torch.tensor([span.offset for span in spans], device=device)
    return Read(
        tokens=offsets if width == 1 else (offsets[:, None] + torch.arange(width, device=device)).flatten(),
        slots=_slots(table, rows, live, page_size).flatten(),
        mask=_mask(seen)[:, None],
        num_rows=len(spans),
        width=width,
    )


def _seen_in_trees(spans: list[Span], at: Tensor, starts: Tensor, window: int | None) -> Tensor:
    """Which slots each node of some trees reads: [num_rows, width, num_keys]. Windows go by positions, not by slots."""
    width = spans[0].width
    trees = [span.tree for span in spans if span.tree is not None]
    depths, sees = torch.stack([tree.depths for tree in trees]), torch.stack([tree.sees for tree in trees])
    node = at - starts  # negative before the tree, too large in the padding
    index = node.clamp(0, width - 1)
    is_before = node < 0
    seen = sees.gather(2, index[:, None].expand(-1, width, -1)) & (node < width)[:, None] | is_before[:, None]
    if window is None:
        return seen
    of = torch.where(is_before, at, starts + depths.gather(1, index))
    return seen & (of[:, None] > (starts + depths)[:, :, None] - window)


def _branch_read(
    table: Tensor,
    rows: Sequence[int],
    branches: Sequence[Branches],
    group: list[int],
    step: int,
    num_keys: int,
    page_size: int,
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
    )


def _chunk_read(table: Tensor, span: Span, page_size: int, window: int | None) -> Read:
    """Several tokens of one row, one after the other."""
    device, first = table.device, first_read(span.start, window)
    of = torch.arange(first, span.end, device=device)
    mask = None
    if first or span.start or window is not None:
        at = torch.arange(span.start, span.end, device=device)[:, None]
        mask = _mask(of <= at if window is None else (of <= at) & (of > at - window))
    return Read(
        tokens=slice(span.offset, span.offset + span.width),
        slots=_slots(table, torch.tensor(span.row, device=device), of, page_size),
        mask=mask,
        num_rows=1,
        width=span.width,
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
        if mask is not None and read.width > 1:
            mask = mask.repeat(1, 1, shared, 1)  # [num_rows, 1, shared * width, num_keys]
        mixed = scaled_dot_product_attention(heads.flatten(2, 3), key, value, attn_mask=mask, scale=scale)
        return mixed.unflatten(2, (shared, read.width)).permute(0, 3, 1, 2, 4).reshape(query.shape)
    heads = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [num_kv_heads, shared, width, head_dim]
    key, value = (each.transpose(0, 1).expand(-1, heads.shape[1], -1, -1) for each in (key, value))
    mixed = scaled_dot_product_attention(heads, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    return mixed.permute(2, 0, 1, 3).reshape(query.shape)
