"""Lookup: the texts of all rows, the drafts that are found in them, and which rounds take these.

Keeps the tokens of every row on the device, of a row that has ended until it begins again: no weights, no KV. Whose
texts a row may see, its scope says; after which matches a row takes what is found, the plan. Used by the drafters that
look drafts up, and by the runner, which tells the scheduler what was found.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from roost.config.options import NO_LOOKUP, SHARED_LOOKUP
from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.drafters.protocol import Pairs
from roost.layers.lookup import NOBODY, Found, Texts, empty_texts
from roost.layers.rounds import NOTHING
from roost.layers.segments import Segments, aranges
from roost.spec_shape import MATCH_MAX
from roost.step import RowSetup

FindDrafts = Callable[[Texts, Tensor, Tensor, int], Found]  # (texts, rows, positions of their last tokens, how many)


class Lookup:
    """What rows have said, and what they may say next."""

    def __init__(self, texts: Texts, find_drafts: FindDrafts, count: int, device: Device) -> None:
        self._texts, self._find_drafts, self._device, self.count = texts, find_drafts, device, count
        num_rows, on = len(texts.tokens), device.torch
        self.head_width = texts.width  # nodes of a round whose drafts are not looked up, at most
        # by row and match length: whether what follows is drafted; on the device, and here
        self._is_wanted = torch.ones((num_rows, MATCH_MAX + 1), dtype=torch.int64, device=on)
        self._is_wanted_host = np.ones((num_rows, MATCH_MAX + 1), dtype=np.bool_)
        # by row, of the last round that drafted: tokens that were found again, whether what followed was used, and that
        self._found = torch.zeros((num_rows, 2 + count), dtype=torch.int64, device=on)

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Take rows' tokens; those of their prompts may be cached, and never run."""
        rows, lens = np.array([setup.row for setup in setups]), np.array([len(setup.tokens) for setup in setups])
        columns = {
            "rows": rows,
            "shared_from": np.array([setup.prompt_len for setup in setups]),
            "scopes": np.array([_number_of(setup.scope) for setup in setups]),
            "cells": np.repeat(rows * self._texts.width, lens) + aranges(lens),
            "tokens": np.concatenate([setup.tokens for setup in setups]),
        }
        sent, texts = self._device.send(columns), self._texts
        texts.tokens.index_fill_(0, sent["rows"], NOTHING)
        texts.tokens.view(-1).index_copy_(0, sent["cells"], sent["tokens"].to(torch.int32))
        texts.shared_from.index_copy_(0, sent["rows"], sent["shared_from"])
        texts.scopes.index_copy_(0, sent["rows"], sent["scopes"])

    def extend(self, pairs: Pairs) -> None:
        """Remember the tokens of a step."""
        self._texts.tokens[pairs.rows, pairs.positions + 1] = pairs.tokens.to(torch.int32)

    def want(self, rows: np.ndarray, widths: np.ndarray, head_width: int) -> None:
        """Say of some rows after which matches what followed is drafted: [R, MATCH_MAX + 1], not where it is 0.

        Where nobody captures the step, a head need not draft for more than `head_width` nodes.
        """
        self.head_width, is_wanted = head_width, widths > 0
        if not np.array_equal(self._is_wanted_host[rows], is_wanted):
            self._is_wanted_host[rows] = is_wanted
            sent = self._device.send({"rows": rows, "is_wanted": is_wanted.astype(np.int64)})
            self._is_wanted.index_copy_(0, sent["rows"], sent["is_wanted"])

    def find(self, rounds: Segments, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        """Drafts [R, count] for rounds, and which of them [R] are to be used.

        `forced` [R, n], if it is known, are the first of them, NOTHING from there on: they count as said.
        """
        found = self._look_up(rounds, forced)
        is_used = self._is_wanted[rounds.rows, found.match_lens] > 0
        columns = (found.match_lens[:, None], is_used[:, None], found.drafts)
        self._found.index_copy_(0, rounds.rows, torch.cat(columns, dim=1))
        return found.drafts, is_used

    def last_found(self, rows: Tensor) -> Tensor:
        """Of rows [R] that have drafted [R, 2 + count]: tokens found again, whether the drafts were used, and these."""
        return self._found.index_select(0, rows)

    def _look_up(self, rounds: Segments, forced: Tensor | None) -> Found:
        if forced is None:
            return self._find_drafts(self._texts, rounds.rows, rounds.start_positions, self.count)
        drafts, match_lens = forced.new_zeros(len(forced), self.count), forced.new_zeros(len(forced))
        for number, tokens in enumerate(forced.tolist()):
            said = forced.new_tensor([token for token in tokens if token >= 0])
            row, last = rounds.rows[number], rounds.start_positions[number]
            self._texts.tokens[row, last + 1 : last + 1 + len(said)] = said.to(torch.int32)
            found = self._find_drafts(self._texts, row[None], last[None] + len(said), self.count)
            drafts[number] = torch.cat([said, found.drafts[0]])[: self.count]
            match_lens[number] = found.match_lens[0]
        return Found(drafts=drafts, match_lens=match_lens)


class HostLookup(Lookup):
    """The same where tensors are in the host's memory: torch takes longer for its operations than they do."""

    def __init__(self, texts: Texts, find_drafts: FindDrafts, count: int, device: Device) -> None:
        super().__init__(texts, find_drafts, count, device)
        self._tokens_host, self._found_host = texts.tokens.numpy(), self._found.numpy()
        self._widths = np.ones((len(texts.tokens), MATCH_MAX + 1), dtype=np.int32)

    def want(self, rows: np.ndarray, widths: np.ndarray, head_width: int) -> None:
        """Say of some rows how many nodes of what followed are verified, by the length of the match."""
        self.head_width, self._widths[rows] = head_width, widths

    def extend(self, pairs: Pairs) -> None:
        """Remember the tokens of a step."""
        self._tokens_host[pairs.rows.numpy(), pairs.positions.numpy() + 1] = pairs.tokens.numpy()

    def find(self, rounds: Segments, forced: Tensor | None) -> tuple[Tensor, Tensor]:
        """Drafts [R, count] for rounds, and which of them [R] are to be used."""
        found, rows = self._look_up(rounds, forced), rounds.rows.numpy()
        match_lens = found.match_lens.numpy()
        is_used = self._widths[rows, match_lens] > 0
        self._found_host[rows, 0], self._found_host[rows, 1] = match_lens, is_used
        self._found_host[rows, 2:] = found.drafts.numpy()
        return found.drafts, torch.from_numpy(is_used)

    def nodes(self, rows: np.ndarray) -> np.ndarray:
        """Nodes of rounds [R] that have drafted: as many as were looked up, or as the head drafts for."""
        widths: np.ndarray = self._widths[rows, self._found_host[rows, 0]]
        return np.where(widths > 0, widths, self.head_width)


def make_lookup(resolved: Resolved, find_drafts: FindDrafts, device: Device, *, is_host: bool) -> Lookup | None:
    """That of an engine, if drafts are looked up in it; `is_host`: the host computes."""
    if resolved.lookup == NO_LOOKUP or not resolved.spec.speculates:
        return None
    num_rows, width = resolved.num_rows + 1, resolved.row_width + 1  # the padding row; a root behind the last position
    texts = empty_texts(num_rows, width, is_shared=resolved.lookup == SHARED_LOOKUP, device=device.torch)
    return (HostLookup if is_host else Lookup)(texts, find_drafts, resolved.spec.depth_max, device)


def _number_of(scope: str | None) -> int:
    """A scope as a number; two have the same one by the greatest of chances only."""
    if scope is None:
        return NOBODY
    return int.from_bytes(blake2b(scope.encode(), digest_size=8).digest(), "big") >> 1 | 1
