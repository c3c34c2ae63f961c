"""N-gram drafter: what followed the last tokens when they came before, in prompt or output, will follow again.

Keeps the tokens of every row on the device, and nothing else: no weights, no KV. Fixed shapes, no host sync; where the
host computes, it looks the tokens up itself, round by round. Proposes chains. Called by the forward passes.
"""

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Device
from roost.drafters.make import Parts
from roost.drafters.protocol import Pairs
from roost.drafters.tree import Trees, chains
from roost.layers.segments import Segments
from roost.step import RowSetup

MATCH_MAX = 4  # tokens that are compared; a longer match is no better


def make(parts: Parts) -> "NgramDrafter":
    """The drafter of an engine."""
    return NgramDrafter(parts.num_rows, parts.resolved.row_width, parts.device, is_host=parts.is_host)


class NgramDrafter:
    """Looks the last tokens up among those before them."""

    def __init__(self, num_rows: int, row_width: int, device: Device, *, is_host: bool = False) -> None:
        self._device = device
        self._tokens = torch.zeros((num_rows, row_width + 1), dtype=torch.int32, device=device.torch)  # by position
        self._tokens_host = self._tokens.numpy() if is_host else None  # the same memory

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Nothing of the target but its tokens."""
        return ()

    def begin(self, setup: RowSetup) -> None:
        """Take a row's tokens; those of its prompt may be cached, and never run."""
        tokens = self._device.send({"tokens": setup.tokens})["tokens"]
        self._tokens[setup.row, : len(tokens)] = tokens.to(torch.int32)

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """Chains of what followed the longest match; the latest one, where several are as long."""
        if self._tokens_host is not None:
            return self._propose_on_host(self._tokens_host, rounds, roots, width, forced)
        starts, host = rounds.start_positions, rounds.host
        longest = self._tokens.shape[1] if host is None else int(host.start_positions.max()) + 1
        known = self._tokens[rounds.rows, :longest].to(torch.int64)  # [R, longest], root included
        at = _best_match(known, starts)
        period = (starts - at)[:, None].clamp(min=1)  # from there on the text may go round in circles
        steps = torch.arange(width - 1, device=known.device)
        drafts = known.gather(1, at[:, None] + 1 + steps % period)
        return chains(torch.cat([roots[:, None], drafts], dim=1))

    def extend(self, pairs: Pairs) -> None:
        """Remember the tokens of a step."""
        if self._tokens_host is not None:
            self._tokens_host[pairs.rows.numpy(), pairs.positions.numpy() + 1] = pairs.tokens.numpy()
            return
        self._tokens[pairs.rows, pairs.positions + 1] = pairs.tokens.to(torch.int32)

    def _propose_on_host(
        self, tokens: np.ndarray, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None
    ) -> Trees:
        """The same, one round after the other; what is forced counts as said."""
        drafted = []
        places = zip(rounds.rows.tolist(), rounds.start_positions.tolist(), roots.tolist(), strict=True)
        for number, (row, start, root) in enumerate(places):
            said = [] if forced is None else [token for token in forced[number].tolist() if token >= 0]
            known = np.append(tokens[row, : start + 1], said).astype(tokens.dtype) if said else tokens[row, : start + 1]
            at = _best_match_on_host(known)
            following = known[at + 1 :].tolist()
            guessed = (following[step % len(following)] for step in range(width - 1 - len(said)))
            drafted.append([root, *said, *guessed])
        return chains(torch.from_numpy(np.array(drafted, dtype=np.int64)))


def _best_match_on_host(known: np.ndarray) -> int:
    """What `_best_match` says of the tokens of one row, the last of them included."""
    last = len(known) - 1
    found = np.flatnonzero(known[:last] == known[last])
    if not len(found):
        return last - 1
    for back in range(1, min(MATCH_MAX, last + 1)):
        longer = found[found >= back]
        longer = longer[known[longer - back] == known[last - back]]
        if not len(longer):
            break
        found = longer
    return int(found[-1])


def _best_match(known: Tensor, lasts: Tensor) -> Tensor:
    """Where the tokens up to `lasts` [R] were seen before: the position of the last one of them, [R].

    Without a match, the position before the last: the last token again.
    """
    position = torch.arange(known.shape[1], device=known.device)
    matched = torch.zeros_like(known)  # tokens that agree, ending at each position
    agrees = position < lasts[:, None]
    for back in range(MATCH_MAX):
        wanted = known.gather(1, (lasts - back).clamp(min=0)[:, None])
        earlier = known.roll(back, dims=1)  # at position i: the token at i - back
        agrees = agrees & (earlier == wanted) & (position >= back)
        matched += agrees
    score = matched * known.shape[1] + position  # the longest, then the latest
    return score.masked_fill(position >= lasts[:, None], -1).argmax(dim=1)
