"""Attention over paged KV, the torch reference for a ragged batch; every other backend is checked against it.

A token at position p reads [0, p], or (p - window, p] in a window layer: the window counts the token itself. A tree's
node reads what is before the tree, and its own ancestors; a draft branch reads the prefix and its own slots. Which
slots each row reads is worked out once a step and used in every layer. What is gathered grows with the live length,
never with the row's width. Every token's keys are summed in one order: by position, in blocks that begin at multiples
of `KEY_BLOCK`, padded to shapes that give the same bits (`layers.batch_invariance`). So a token's result is bit for bit
the same in a chunk of any length, in a round of any width, in a tree and alone. Called by attention backends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from roost.layers.batch_invariance import KEY_BLOCK, AttentionPadding, attention_padding, padded_rows
from roost.layers.quantised_kv import dequantise
from roost.layers.rotary import CosSin
from roost.layers.segments import HostSegments, Segments, key_weights


class Attend(Protocol):
    """A model's one way to the KV cache."""

    def __call__(
        self, layer: int, qk: Tensor, value: Tensor | None, cos_sin: CosSin, sinks: Tensor | None = None
    ) -> Tensor:
        """What the heads of a layer read: of queries and keys side by side, before rotation, and values.

        Without values there are queries alone: they read what was handed in for that layer before, in this pass too.
        Sinks [num_heads] float32 are scores, one for each head, that join the sum of weights and stand for no key.
        """
        ...


_GATHER_MAX = 2048  # slots of several rows gathered at a time: what a core's cache holds
_Kept = tuple[Tensor, Tensor | None]  # keys or values as slots keep them, and their scales if they are quantised


class _Segment(NamedTuple):
    """One segment, as the host plans it."""

    row: int
    offset: int  # tokens [offset, offset + width) of the flat batch
    width: int
    start: int  # slots [start, start + width) of the row; also their positions, without a tree
    tree: int  # -1: none

    @property
    def end(self) -> int:
        """First slot past the tokens: the row's live length once they are written."""
        return self.start + self.width


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadGroup:
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
    table: Tensor, segments: Segments, *, page_size: int, window: int | None, head_dim: int
) -> list[ReadGroup]:
    """What segments, known on the host, read through a book's page table [num_rows, pages_per_row]."""
    padding, host = attention_padding(head_dim), segments.host
    assert host is not None
    if host.branch_bases is not None:
        return _plan_branches(table, host, page_size, padding)
    tree_of = host.tree_of if segments.tree_mask is not None else np.full_like(host.tree_of, -1)
    columns = [host.rows, host.offsets, host.query_lens, host.start_positions, tree_of]
    groups: list[ReadGroup] = []
    rounds: dict[tuple[int, int, bool], list[_Segment]] = {}  # by width, keys they are padded to, and kind
    for is_round, place in zip(host.is_round.tolist(), np.stack(columns, axis=1).tolist(), strict=True):
        segment = _Segment(*place)
        if segment.width > 1 and not is_round:
            groups.append(_chunk_read(table, segment, page_size, window, padding))
        else:
            num_keys = padding.keys_for(segment.end - _first_key(segment.start, window))
            rounds.setdefault((segment.width, num_keys, segment.tree >= 0), []).append(segment)
    for (width, num_keys, are_trees), group in rounds.items():
        if are_trees:
            for part in _at_once(len(group), num_keys * width):
                for nodes in _at_once(width, num_keys):
                    groups.append(_tree_read(table, segments, group[part], nodes, num_keys, page_size, window, padding))
        else:
            for part in _at_once(len(group), num_keys):
                groups.append(_round_read(table, group[part], num_keys, page_size, window, padding))
    return groups


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    groups: Sequence[ReadGroup],
    *,
    scale: float,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the heads [num_tokens, num_heads, head_dim] read from slots [num_slots, num_kv_heads, head_dim].

    Scales [num_kv_heads, 2, num_slots] are those of quantised keys and values; sinks are as in `Attend`.
    """
    key_scales, value_scales = (None, None) if scales is None else scales.unbind(1)
    kept = (keys, key_scales), (values, value_scales)
    if len(groups) == 1:
        return _attend(query, *kept, groups[0], scale, sinks)
    output = torch.empty_like(query)
    for group in groups:
        output[group.tokens] = _attend(query[group.tokens], *kept, group, scale, sinks)
    return output


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    first: int,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one dense row, plainly written: queries from position `start` on, keys from position `first` on."""
    num_tokens, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    groups = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", groups, key) * scale
    at = torch.arange(start, start + num_tokens, device=query.device)[:, None]
    of = torch.arange(first, first + num_keys, device=query.device)[None, :]
    unseen = of > at if window is None else (of > at) | (of <= at - window)
    weights = key_weights(scores.to(torch.float32).masked_fill(unseen, -torch.inf), sinks).to(query.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, value).reshape(num_tokens, num_heads, head_dim)


def _first_key(start: int, window: int | None) -> int:
    """First key that is laid out for a token at `start`: blocks of keys begin at the same positions for everybody."""
    return first_read(start, window) // KEY_BLOCK * KEY_BLOCK


def _at_once(num_rows: int, num_keys: int) -> list[slice]:
    """Pieces of a group that are one operation each."""
    at_once = max(1, _GATHER_MAX // num_keys)
    return [slice(first, first + at_once) for first in range(0, num_rows, at_once)]


def _round_read(
    table: Tensor, rounds: list[_Segment], num_keys: int, page_size: int, window: int | None, padding: AttentionPadding
) -> ReadGroup:
    """One token in each of several rows, or a chain of them in each."""
    device, width = table.device, rounds[0].width
    rows, starts, firsts, at = _keys_of(table, rounds, num_keys, window)  # [num_rows, 1], and [num_rows, num_keys]
    live = at.clamp(firsts, starts + width - 1)  # the padding reads a token again, without weight
    positions = starts + torch.arange(width, device=device)  # [num_rows, width]
    offsets = torch.tensor([each.offset for each in rounds], device=device)
    return ReadGroup(
        tokens=offsets if width == 1 else (offsets[:, None] + torch.arange(width, device=device)).flatten(),
        slots=_slots(table, rows, live, page_size).flatten(),
        mask=_mask(_seen(at[:, None], positions[:, :, None], window))[:, None],
        num_rows=len(rounds),
        width=width,
        rows=padding.rows,
    )


def _tree_read(
    table: Tensor,
    segments: Segments,
    rounds: list[_Segment],
    nodes: slice,
    num_keys: int,
    page_size: int,
    window: int | None,
    padding: AttentionPadding,
) -> ReadGroup:
    """Some nodes of trees, each as a row of its own: it reads what is before the tree, then its path from the root.

    So its keys are in the order of their positions, as they are when the path has become plain text.
    """
    assert segments.tree_depths is not None and segments.tree_mask is not None
    device, width = table.device, rounds[0].width
    rows, starts, firsts, at = (each[:, None] for each in _keys_of(table, rounds, num_keys, window))
    trees = torch.tensor([each.tree for each in rounds], device=device)
    depths = segments.tree_depths[trees, :width]  # [num_rows, width]
    mask = segments.tree_mask[trees, :width, :width]
    paths = torch.where(mask, depths[:, None], width).argsort(dim=-1, stable=True)  # nodes from the root on
    paths, positions = paths[:, nodes], (starts + depths[:, :, None])[:, nodes]  # [num_rows, num_nodes, …]
    at = at.expand(-1, positions.shape[1], -1)
    live = torch.minimum(at.clamp(min=firsts), positions)
    on_path = starts + paths.gather(2, (live - starts).clamp(min=0))
    places = torch.where(live < starts, live, on_path)
    offsets = torch.tensor([each.offset for each in rounds], device=device)
    return ReadGroup(
        tokens=(offsets[:, None] + torch.arange(width, device=device)[nodes]).flatten(),
        slots=_slots(table, rows, places, page_size).flatten(),
        mask=_mask(_seen(at, positions, window)).flatten(0, 1)[:, None, None],
        num_rows=len(rounds) * positions.shape[1],
        width=1,
        rows=padding.rows,
    )


def _keys_of(
    table: Tensor, rounds: list[_Segment], num_keys: int, window: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, starts and first reads [num_rows, 1] of rounds, and the positions [num_rows, num_keys] of their keys."""
    columns = [
        (each.row, each.start, first_read(each.start, window), _first_key(each.start, window)) for each in rounds
    ]
    row, start, first, first_key = torch.tensor(columns, device=table.device)[:, :, None].unbind(1)
    return row, start, first, first_key + torch.arange(num_keys, device=table.device)


def _seen(of: Tensor, at: Tensor, window: int | None) -> Tensor:
    """Whether a token at position `at` reads a key of position `of`."""
    return of <= at if window is None else (of <= at) & (of > at - window)


def _plan_branches(table: Tensor, host: HostSegments, page_size: int, padding: AttentionPadding) -> list[ReadGroup]:
    """What the K branches of each round read at a draft step, all K at once."""
    assert host.branch_bases is not None and host.branch_shifts is not None
    topk = host.num_branches
    first, second = slice(0, None, topk), slice(1, None, topk)  # the first branch is not shifted
    own_lens = host.start_positions[first] + 1 - host.branch_bases[first]
    columns = np.stack([host.rows[first], host.branch_bases[first], host.branch_shifts[second], own_lens], axis=1)
    rounds: dict[int, list[int]] = {}  # by how many keys they are padded to
    for number, (_, base, _, own_len) in enumerate(columns.tolist()):
        rounds.setdefault(padding.keys_for(base + topk * own_len), []).append(number)
    return [
        _branch_read(table, columns, topk, group[part], num_keys, page_size, padding)
        for num_keys, group in rounds.items()
        for part in _at_once(len(group), num_keys)
    ]


def _branch_read(
    table: Tensor,
    columns: np.ndarray,
    topk: int,
    group: list[int],
    num_keys: int,
    page_size: int,
    padding: AttentionPadding,
) -> ReadGroup:
    """Some rounds' branches: the prefix up to `base`, then each branch's own positions, one branch after the other.

    The flat batch holds K tokens of each round, in order.
    """
    device = table.device
    row, base, stride, own_len = torch.tensor(columns[group], device=device)[:, :, None].unbind(1)  # [num_rows, 1] each
    at = torch.arange(num_keys, device=device).expand(len(group), -1)
    branch = (at - base).div(own_len, rounding_mode="floor")  # negative in the prefix, `topk` in the padding
    within = (at - base) - branch * own_len
    last = base + own_len - 1  # the padding reads a token of branch 0 again, without weight
    positions = torch.where(branch < 0, at, torch.where(branch < topk, base + branch * stride + within, last))
    seen = (branch < 0)[:, None] | (branch[:, None] == torch.arange(topk, device=device)[None, :, None])
    offsets = torch.tensor(group, device=device) * topk
    return ReadGroup(
        tokens=(offsets[:, None] + torch.arange(topk, device=device)).flatten(),
        slots=_slots(table, row, positions, page_size).flatten(),
        mask=_mask(seen)[:, None],
        num_rows=len(group),
        width=topk,
        rows=padding.rows,
    )


def _chunk_read(
    table: Tensor, chunk: _Segment, page_size: int, window: int | None, padding: AttentionPadding
) -> ReadGroup:
    """Several tokens of one row, one after the other."""
    device, first = table.device, first_read(chunk.start, window)
    first_key = _first_key(chunk.start, window)
    of = first_key + torch.arange(padding.keys_for(chunk.end - first_key), device=device)
    mask = None
    if first_key or chunk.start or window is not None:
        at = chunk.start + torch.arange(padded_rows(chunk.width, padding.rows), device=device)[:, None]
        mask = _mask(_seen(of, at.clamp(max=chunk.end - 1), window))
    return ReadGroup(
        tokens=slice(chunk.offset, chunk.offset + chunk.width),
        slots=_slots(table, torch.tensor(chunk.row, device=device), of.clamp(first, chunk.end - 1), page_size),
        mask=mask,
        num_rows=1,
        width=chunk.width,
        rows=padding.rows,
    )


def _mask(seen: Tensor) -> Tensor:
    """What is added to the scores of keys: nothing, or minus infinity where they are not seen."""
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)


def _slots(table: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    return table[rows, positions // page_size].to(torch.int64) * page_size + positions % page_size


def _attend(query: Tensor, keys: _Kept, values: _Kept, group: ReadGroup, scale: float, sinks: Tensor | None) -> Tensor:
    """One operation: [num_rows * width, num_heads, head_dim], in the order of the rows."""
    _, num_kv_heads, head_dim = keys[0].shape
    gathered = (_gathered(each, group.slots, query.dtype) for each in (keys, values))
    key, value = (each.unflatten(0, (group.num_rows, -1)) for each in gathered)
    key, value = key.transpose(1, 2), value.transpose(1, 2)  # [num_rows, num_kv_heads, num_keys, head_dim]
    mask, shared = None if group.mask is None else group.mask.to(query.dtype), query.shape[1] // num_kv_heads
    each_sink = None if sinks is None else sinks.view(num_kv_heads, shared)
    if not isinstance(group.tokens, slice):  # the heads that share keys stand in for a sequence
        heads = query.reshape(group.num_rows, group.width, num_kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4)
        heads, num_rows = _padded(heads.flatten(2, 3), group.rows), shared * group.width
        if mask is not None and group.width > 1:  # [num_rows, 1, shared * width, num_keys]
            mask = _padded(mask.repeat(1, 1, shared, 1), group.rows)
        if each_sink is not None:
            each_sink = _padded(each_sink.repeat_interleave(group.width, dim=1)[..., None], group.rows)[..., 0]
        mixed = _mixed(heads, key, value, mask, scale, each_sink)[:, :, :num_rows]
        return mixed.unflatten(2, (shared, group.width)).permute(0, 3, 1, 2, 4).reshape(query.shape)
    heads = query.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [num_kv_heads, shared, width, head_dim]
    heads = _padded(heads, group.rows)
    key, value = (each.transpose(0, 1).expand(-1, heads.shape[1], -1, -1) for each in (key, value))
    mixed = _mixed(heads, key, value, mask, scale, None if each_sink is None else each_sink[..., None])
    return mixed[:, :, : group.width].permute(2, 0, 1, 3).reshape(query.shape)


def _mixed(
    heads: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """What heads [a, b, num_rows, head_dim] read; without a mask plainly causal. Sinks [b, num_rows] or [a, b, 1].

    A sink makes what is read smaller: by its share of the sum of weights, which is known after the keys were summed. So
    their order is what it is without; and torch's attention on a CPU says what the sum was.
    """
    is_causal = mask is None
    if sinks is None:
        return scaled_dot_product_attention(heads, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    if heads.device.type != "cpu":
        return _mixed_beside_column(heads, key, value, mask, scale, sinks)
    mixed, level = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        heads, key, value, is_causal=is_causal, attn_mask=mask, scale=scale
    )
    with np.errstate(over="ignore"):  # torch's exponentials have other bits at the end of a tensor, numpy's have not
        odds = torch.from_numpy(np.exp((sinks - level).contiguous().numpy()))
    return (mixed.to(torch.float32) / (1.0 + odds)[..., None]).to(heads.dtype)


def _mixed_beside_column(
    heads: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """The same where nobody says what the sum was: a sink is the score of one more key, whose value is zero."""
    if mask is None:
        mask = _mask(torch.ones((heads.shape[2], key.shape[2]), dtype=torch.bool, device=heads.device).tril())
    column = sinks.expand(heads.shape[:3])[..., None].to(heads.dtype)
    mask = torch.cat([mask.to(heads.dtype).expand(*heads.shape[:3], -1), column], dim=-1)
    key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    return scaled_dot_product_attention(heads, key, value, attn_mask=mask, scale=scale)


def _gathered(kept: _Kept, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values of some slots; those that are quantised, in the queries' type."""
    buffer, scales = kept
    taken = buffer.index_select(0, slots)
    return taken if scales is None else dequantise(taken, scales.index_select(1, slots).t(), dtype)


def _padded(rows: Tensor, multiple: int) -> Tensor:
    """Rows [..., num_rows, n] padded to a multiple."""
    missing = padded_rows(rows.shape[-2], multiple) - rows.shape[-2]
    return pad(rows, (0, 0, 0, missing)) if missing else rows
