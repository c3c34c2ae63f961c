"""The index arithmetic of rounds that are chains of one width, before the target's pass and after it; in torch.

W nodes of a round lie next to each other in the flat batch: its last token, then its drafts. A draft is kept if it and
all before it are what was drawn; the token drawn after the last one kept is the bonus. These forms are the reference of
the fused ones. Called by the forward passes, through `Ops`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOTHING = -1  # no such token


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowState:
    """What the device knows of every row."""

    lengths: Tensor  # [num_rows] int64
    last_tokens: Tensor  # [num_rows] int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """The page table of a book."""

    table: Tensor  # [num_rows, pages_per_row] int32
    size: int  # tokens of a page

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of some positions, each in its row."""
        pages = self.table[rows, positions // self.size].to(torch.int64)
        return pages * self.size + positions % self.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainInputs:
    """The target's batch."""

    starts: Tensor  # [R] position of each round's first node
    tokens: Tensor  # [R, W]
    positions: Tensor  # [R * W]
    slots: tuple[Tensor, ...]  # of each book [R * W]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SettledChains:
    """What rounds accepted, and the pairs that a drafter takes over: each node's, those past the accepted ones void."""

    result: Tensor  # [R, 2 + W] tokens added, length now, the tokens, then NOTHING: what the host is told
    nodes: Tensor  # [R, W] the node each token was drawn at; the last one kept again in the padding
    pair_rows: Tensor  # [R * W]
    pair_positions: Tensor  # [R * W]
    pair_tokens: Tensor  # [R * W] the token after each position; 0 in void pairs
    pair_slots: Tensor  # [R * W]
    last_pairs: Tensor  # [R] the last pair of each round that is not void


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainPlaces:
    """Where a draft head writes, step by step: position start + s at step s."""

    positions: Tensor  # [S, R]
    slots: Tensor  # [S, R]


def chain_places(rows: Tensor, starts: Tensor, num_steps: int, pages: Pages) -> ChainPlaces:
    """Positions and slots of the draft steps of rounds `rows` [R] that start at `starts` [R]."""
    positions = starts + torch.arange(num_steps, device=rows.device)[:, None]
    return ChainPlaces(positions=positions, slots=pages.slots(rows.expand_as(positions), positions))


def chain_inputs(rows: Tensor, state: RowState, drafts: Tensor | None, pages: tuple[Pages, ...]) -> ChainInputs:
    """The target's batch of rounds `rows` [R]: each its last token, then its `drafts` [R, W - 1]."""
    starts, tokens = state.lengths[rows], state.last_tokens[rows][:, None]
    if drafts is not None:
        tokens = torch.cat([tokens, drafts], dim=1)
    positions = starts[:, None] + torch.arange(tokens.shape[1], device=rows.device)
    return ChainInputs(
        starts=starts,
        tokens=tokens,
        positions=positions.flatten(),
        slots=tuple(each.slots(rows[:, None], positions).flatten() for each in pages),
    )


def chain_lens(tokens: Tensor, drawn: Tensor) -> Tensor:
    """Tokens [R] that chains `tokens` [R, W] add of those drawn after each node, bonus included.

    A draft counts if it and all before it were drawn; one that is not there never was.
    """
    is_right = tokens[:, 1:] == drawn[:, :-1]
    return is_right.to(torch.int64).cumprod(dim=1).sum(dim=1) + 1


def settle_chains(
    rows: Tensor, state: RowState, inputs: ChainInputs, drawn: Tensor, padding_row: int, pages: Pages
) -> SettledChains:
    """What rounds accept of `drawn` [R, W], the token drawn after each node; the row state is brought up to date."""
    lens = chain_lens(inputs.tokens, drawn)
    number = torch.arange(drawn.shape[1], device=rows.device)
    is_kept = number < lens[:, None]
    ends = (inputs.starts + lens).masked_fill(rows == padding_row, 0)
    state.lengths[rows] = ends
    state.last_tokens[rows] = drawn.gather(1, lens[:, None] - 1).squeeze(1)
    firsts = torch.arange(len(rows), device=rows.device) * drawn.shape[1]
    positions = inputs.starts[:, None] + number
    return SettledChains(
        result=torch.cat([lens[:, None], ends[:, None], drawn.masked_fill(~is_kept, NOTHING)], dim=1),
        nodes=torch.minimum(number, lens[:, None] - 1),
        pair_rows=rows[:, None].expand_as(drawn).flatten(),
        pair_positions=positions.flatten(),
        pair_tokens=drawn.masked_fill(~is_kept, 0).flatten(),
        pair_slots=pages.slots(rows[:, None], positions).flatten(),
        last_pairs=firsts + lens - 1,
    )
