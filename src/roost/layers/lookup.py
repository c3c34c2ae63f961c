"""Drafts that are looked up: what followed the last tokens when they came before will follow again.

A row's own text is searched from end to end. What other rows of its scope say is found through one table, by the hash
of four tokens: the latest place where they were said. A place is only a hint: tokens and scope are compared there, so
an old entry, or one of a text that is gone, does no harm. Fixed shapes, no host sync; the reference of the forms in
`host_lookup` and `kernels.lookup`. Called by drafters, through `Ops`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from roost.layers.rounds import NOTHING
from roost.spec_shape import MATCH_MAX

GRAM = 4  # tokens by which other rows' texts are found: fewer are said by chance
PRIME, FACTOR = 2**31 - 1, 1103515245  # of the hash: every product fits 63 bits
NOBODY = 0  # the scope of a row that shares with no other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Texts:
    """The texts of all rows, in tables on the device that never move."""

    tokens: Tensor  # [num_rows, width] int32 by position; NOTHING where nothing was said yet
    shared_from: Tensor  # [num_rows] int64: the first position that other rows may find
    scopes: Tensor  # [num_rows] int64, not negative: rows of one scope share; NOBODY
    # [2**n + 1] int64: by the hash of scope and tokens, `row * width + position` of the last of them; -1: none. The
    # last entry takes what is not to be kept. None: nobody shares
    places: Tensor | None

    @property
    def width(self) -> int:
        """Positions of a row."""
        return self.tokens.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What was looked up for some rounds."""

    drafts: Tensor  # [R, count] int64; of no worth where nothing was found, but always tokens
    match_lens: Tensor  # [R] int64: how many tokens came before, MATCH_MAX at most; 0: none


def find_drafts(texts: Texts, rows: Tensor, lasts: Tensor, count: int) -> Found:
    """What followed the tokens up to positions `lasts` [R] of `rows` [R] before; the longest match, then the latest.

    A match in the own text goes on in circles where it reaches the end. What was said up to `lasts` can be found by
    other rows from now on.
    """
    steps = torch.arange(count, device=rows.device)
    scores = best_matches(texts.tokens, rows, lasts)
    match_lens, at = scores // texts.width, scores % texts.width
    period = (lasts - at)[:, None].clamp(min=1)
    drafts = texts.tokens[rows[:, None], at[:, None] + 1 + steps % period]
    if texts.places is not None:
        _share(texts, texts.places, rows, lasts, count + 1)
        place, lens = _said_by_others(texts, texts.places, rows, lasts)
        after = (place % texts.width)[:, None] + 1 + steps
        others = texts.tokens[(place // texts.width)[:, None], after.clamp(max=texts.width - 1)]
        is_better = lens > match_lens
        drafts, match_lens = torch.where(is_better[:, None], others, drafts), torch.where(is_better, lens, match_lens)
    return Found(drafts=drafts.to(torch.int64).clamp(min=0), match_lens=match_lens)


def best_matches(tokens: Tensor, rows: Tensor, lasts: Tensor) -> Tensor:
    """Where the tokens up to `lasts` [R] came before in their rows, [R]: matched tokens * width + position of the last.

    Without a match, the position before the last: the last token again.
    """
    width = tokens.shape[1]
    known, position = tokens[rows].to(torch.int64), torch.arange(width, device=rows.device)  # [R, width]
    matched = torch.zeros_like(known)  # tokens that agree, ending at each position
    agrees = position < lasts[:, None]
    for back in range(MATCH_MAX):
        wanted = known.gather(1, (lasts - back).clamp(min=0)[:, None])
        earlier = known.roll(back, dims=1)  # at position i: the token at i - back
        agrees = agrees & (earlier == wanted) & (position >= back)
        matched += agrees
    scores = matched * width + position  # the longest, then the latest
    return scores.masked_fill(position >= lasts[:, None], -1).amax(dim=1).clamp(min=0)


def _hashes(texts: Texts, places: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """Entries of the table for the GRAM tokens that end at `ends` [...], none of them before the row's begin."""
    found = texts.scopes[rows] % PRIME
    for back in reversed(range(GRAM)):
        token = texts.tokens[rows, (ends - back).clamp(min=0)].to(torch.int64)
        found = (found * FACTOR + token + 1) % PRIME
    return found & (len(places) - 2)  # a power of two, and one entry besides


def _share(texts: Texts, places: Tensor, rows: Tensor, lasts: Tensor, count: int) -> None:
    """Enter the last `count` places of each row whose next token is known and may be found."""
    rows = rows[:, None].expand(-1, count)
    ends = lasts[:, None] - 1 - torch.arange(count, device=rows.device).flip(0)  # the latest is entered last
    is_shared = (texts.scopes[rows] != NOBODY) & (ends >= GRAM - 1) & (ends + 1 >= texts.shared_from[rows])
    entries = _hashes(texts, places, rows, ends).masked_fill(~is_shared, len(places) - 1)
    places[entries] = rows * texts.width + ends


def _said_by_others(texts: Texts, places: Tensor, rows: Tensor, lasts: Tensor) -> tuple[Tensor, Tensor]:
    """The place [R] where the last tokens were said, and how many agree there [R]; 0 where it is none."""
    found = places[_hashes(texts, places, rows, lasts)]
    place = found.clamp(min=0)
    source, at = place // texts.width, place % texts.width
    back = torch.arange(MATCH_MAX, device=rows.device)
    here, there = lasts[:, None] - back, at[:, None] - back
    agrees = texts.tokens[rows[:, None], here.clamp(min=0)] == texts.tokens[source[:, None], there.clamp(min=0)]
    agrees = agrees & (here >= 0) & (there >= 0)
    lens = agrees.to(torch.int64).cumprod(dim=1).sum(dim=1)
    scopes = texts.scopes[rows]
    is_found = (found >= 0) & (scopes != NOBODY) & (texts.scopes[source] == scopes) & (lens >= GRAM)
    return place, lens * is_found


def empty_texts(num_rows: int, width: int, *, is_shared: bool, device: torch.device) -> Texts:
    """Tables for rows that have said nothing."""
    entries = min(_PLACES_MAX, 1 << (num_rows * width).bit_length())
    return Texts(
        tokens=torch.full((num_rows, width), NOTHING, dtype=torch.int32, device=device),
        shared_from=torch.zeros(num_rows, dtype=torch.int64, device=device),
        scopes=torch.full((num_rows,), NOBODY, dtype=torch.int64, device=device),
        places=torch.full((entries + 1,), -1, dtype=torch.int64, device=device) if is_shared else None,
    )


_PLACES_MAX = 2**20  # 8 MB
