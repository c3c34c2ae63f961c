"""Drafts that are looked up, in Triton: what `layers.lookup` finds, by two kernels.

The first cuts each row's text [width] int32 into chunks, a program each, which compare every position's last tokens
with the row's and keep the best score, matched tokens * width + position; the row's new places are entered in the table
beside it. The second, a program a row, takes the best chunk, looks the last tokens up in the table, and reads the
drafts from the better of the two. Reads a row's text up to MATCH_MAX times, all but the first from caches. One of the
`Ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost import spec_shape
from roost.layers import lookup
from roost.layers.lookup import Found, Texts

_CHUNK = 1024  # positions of a program
_MATCH_MAX, _GRAM = tl.constexpr(spec_shape.MATCH_MAX), tl.constexpr(lookup.GRAM)
_PRIME, _FACTOR = tl.constexpr(lookup.PRIME), tl.constexpr(lookup.FACTOR)
_NOBODY = tl.constexpr(lookup.NOBODY)


def find_drafts(texts: Texts, rows: Tensor, lasts: Tensor, count: int) -> Found:
    """What followed the tokens up to positions `lasts` [R] of `rows` [R] before; the longest match, then the latest."""
    number, width, places = len(rows), texts.width, texts.places
    num_chunks = triton.cdiv(width, _CHUNK)
    scores = torch.empty((number, num_chunks), dtype=torch.int64, device=rows.device)
    drafts = torch.empty((number, count), dtype=torch.int64, device=rows.device)
    match_lens = torch.empty(number, dtype=torch.int64, device=rows.device)
    if number:
        is_shared, mask = places is not None, 0 if places is None else len(places) - 2
        tables = (texts.tokens, texts.shared_from, texts.scopes, texts.scopes if places is None else places)
        sizes = {"WIDTH": width, "COUNT": count, "MASK": mask, "SHARED": is_shared, "num_warps": 4}
        ends = triton.next_power_of_2(count + 1)
        _scan[(number, num_chunks)](*tables, rows, lasts, scores, CHUNK=_CHUNK, ENDS=ends, **sizes)
        chunks = {"NUM_CHUNKS": num_chunks, "CHUNKS": triton.next_power_of_2(num_chunks)}
        _find[(number,)](*tables, rows, lasts, scores, drafts, match_lens, STEPS=ends, **chunks, **sizes)
    return Found(drafts=drafts, match_lens=match_lens)


@triton.jit
def _entries(text, scope, ends, MASK: tl.constexpr):
    """Entries of the table for the tokens of a row that end at `ends`."""
    found = ends * 0 + scope % _PRIME
    for i in tl.static_range(_GRAM):
        token = tl.load(text + tl.maximum(ends - (_GRAM - 1 - i), 0)).to(tl.int64)
        found = (found * _FACTOR + token + 1) % _PRIME
    return found & MASK


@triton.jit
def _scan(
    tokens,
    shared_from,
    scopes,
    places,
    rows,
    lasts,
    scores,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    MASK: tl.constexpr,
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    ENDS: tl.constexpr,
):
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, last = tl.load(rows + number), tl.load(lasts + number)
    text = tokens + row * WIDTH
    position = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    is_before = position < last
    agrees, matched = is_before, tl.zeros([CHUNK], dtype=tl.int64)
    for back in tl.static_range(_MATCH_MAX):
        wanted = tl.load(text + tl.maximum(last - back, 0))
        earlier = tl.load(text + position - back, mask=is_before & (position >= back), other=-2)
        agrees = agrees & (earlier == wanted)
        matched += agrees.to(tl.int64)
    best = tl.max(tl.where(is_before, matched * WIDTH + position, -1), 0)
    tl.store(scores + number * tl.num_programs(1) + chunk, best)
    if SHARED:
        scope = tl.load(scopes + row)
        if (chunk == 0) & (scope != _NOBODY):
            step = tl.arange(0, ENDS).to(tl.int64)
            ends = last - 1 - step
            is_entered = (step <= COUNT) & (ends >= _GRAM - 1) & (ends + 1 >= tl.load(shared_from + row))
            tl.store(places + _entries(text, scope, ends, MASK), row * WIDTH + ends, mask=is_entered)


@triton.jit
def _find(
    tokens,
    shared_from,
    scopes,
    places,
    rows,
    lasts,
    scores,
    drafts,
    match_lens,
    WIDTH: tl.constexpr,
    COUNT: tl.constexpr,
    MASK: tl.constexpr,
    SHARED: tl.constexpr,
    STEPS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    number, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    row, last = tl.load(rows + number), tl.load(lasts + number)
    text, step = tokens + row * WIDTH, tl.arange(0, STEPS).to(tl.int64)
    score = tl.max(tl.load(scores + number * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=0), 0)
    score = tl.maximum(score, 0)
    length, at = score // WIDTH, score % WIDTH
    after = row * WIDTH + at + 1 + step % tl.maximum(last - at, 1)  # in all texts, one after the other
    if SHARED:
        scope = tl.load(scopes + row)
        back = tl.arange(0, _MATCH_MAX).to(tl.int64)
        place = tl.load(places + tl.sum(_entries(text, scope, last + step * 0, MASK) * (step == 0), 0))
        is_found = (place >= 0) & (scope != _NOBODY)
        place = tl.maximum(place, 0)
        source, there = place // WIDTH, place % WIDTH
        is_found = is_found & (tl.load(scopes + source) == scope)
        is_in = (back <= last) & (back <= there)
        own = tl.load(text + last - back, mask=is_in, other=0)
        other = tl.load(tokens + place - back, mask=is_in, other=0)
        differs = (own != other) | (back > last) | (back > there)
        agreeing = tl.min(tl.where(differs, back, _MATCH_MAX), 0)
        if is_found & (agreeing >= _GRAM) & (agreeing > length):
            length = agreeing
            after = source * WIDTH + tl.minimum(there + 1 + step, WIDTH - 1)
    draft = tl.load(tokens + after, mask=step < COUNT, other=0).to(tl.int64)
    tl.store(drafts + number * COUNT + step, tl.maximum(draft, 0), mask=step < COUNT)
    tl.store(match_lens + number, length)
