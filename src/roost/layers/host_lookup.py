"""Drafts that are looked up, in plain Python, for texts that are in the host's memory.

What is found is what `layers.lookup` finds. A row has few new tokens a round, and a numpy operation takes as long as
many steps of a loop over them. Called through `Ops`, on a CPU.
"""

import numpy as np
import torch
from torch import Tensor

from roost.layers.lookup import FACTOR, GRAM, NOBODY, PRIME, Found, Texts
from roost.spec_shape import MATCH_MAX


def find_drafts(texts: Texts, rows: Tensor, lasts: Tensor, count: int) -> Found:
    """What followed the tokens up to positions `lasts` [R] of `rows` [R] before; the longest match, then the latest."""
    tokens, width = texts.tokens.numpy(), texts.width
    found, lens = [], []
    for row, last in zip(rows.tolist(), lasts.tolist(), strict=True):
        known = tokens[row]
        at, length = _best_match(known, last)
        following = known[at + 1 : min(last, at + count) + 1].tolist()
        drafts = [following[step % len(following)] for step in range(count)] if following else [0] * count
        if texts.places is not None:
            scope = texts.scopes.numpy().item(row)
            if scope != NOBODY:
                places, first = texts.places.numpy(), texts.shared_from.numpy().item(row)
                _share(
                    known, places, scope, row * width, range(last - 1, max(last - 2 - count, GRAM - 2, first - 2), -1)
                )
                place = _said_by_others(texts, places, scope, known, last)
                if place is not None and place[1] > length:
                    length, source, at = place[1], *divmod(place[0], width)
                    after = tokens[source, at + 1 : at + 1 + count].tolist()
                    drafts = after + after[-1:] * (count - len(after))
        found.append(drafts)
        lens.append(length)
    drafted = np.array(found, dtype=np.int64).reshape(len(found), count)
    np.maximum(drafted, 0, out=drafted)
    return Found(drafts=torch.from_numpy(drafted), match_lens=torch.from_numpy(np.array(lens, dtype=np.int64)))


def _best_match(known: np.ndarray, last: int) -> tuple[int, int]:
    """Where the tokens up to `last` came before: the position of the last of them, and how many agree."""
    found = np.flatnonzero(known[:last] == known[last])
    if not len(found):
        return max(0, last - 1), 0
    length = 1
    while length < min(MATCH_MAX, last + 1):
        longer = found[found >= length]
        longer = longer[known[longer - length] == known[last - length]]
        if not len(longer):
            break
        found, length = longer, length + 1
    return int(found[-1]), length


def _entry(known: np.ndarray, end: int, scope: int, num_places: int) -> int:
    """The table's entry for the GRAM tokens that end at a position."""
    found = scope % PRIME
    for token in known[end - GRAM + 1 : end + 1].tolist():
        found = (found * FACTOR + token + 1) % PRIME
    return found & (num_places - 2)


def _share(known: np.ndarray, places: np.ndarray, scope: int, first: int, ends: range) -> None:
    """Enter places of a row whose first is `first`; `ends` are the latest first, and before one that stands all do."""
    new = []
    for end in ends:
        entry = _entry(known, end, scope, len(places))
        if places.item(entry) == first + end:
            break
        new.append((entry, first + end))
    for entry, place in reversed(new):  # of equal ones the latest stands
        places[entry] = place


def _said_by_others(
    texts: Texts, places: np.ndarray, scope: int, known: np.ndarray, last: int
) -> tuple[int, int] | None:
    """The place where the last tokens were said, and how many agree there."""
    if last < GRAM - 1:
        return None
    place = places.item(_entry(known, last, scope, len(places)))
    if place < 0:
        return None
    source, at = divmod(place, texts.width)
    if texts.scopes.numpy().item(source) != scope:
        return None
    there, length = texts.tokens.numpy()[source], 0
    while length < min(MATCH_MAX, last + 1, at + 1) and there[at - length] == known[last - length]:
        length += 1
    return (place, length) if length >= GRAM else None
