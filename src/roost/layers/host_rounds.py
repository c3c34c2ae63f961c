"""The index arithmetic of rounds that are chains, in numpy, for tensors that are in the host's memory.

The numbers are those of `layers.rounds`. A torch operation on a few integers costs several times what numpy's does, and
gives up the interpreter each time, for which other threads wait. What is returned shares memory with numpy arrays.
Called through `Ops`, on a CPU.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.layers.rounds import NOTHING, ChainInputs, ChainPlaces, Pages, RowState, SettledChains

Index = NDArray[np.int64]


@cache
def _numbers(count: int) -> Index:
    """0, 1, … count - 1; never written to."""
    numbers = np.arange(count)
    numbers.setflags(write=False)
    return numbers


def _slots(pages: Pages, rows: Index, positions: Index) -> Tensor:
    """Slots of some positions, each in its row, in a flat batch."""
    page, offset = np.divmod(positions, pages.size)
    return torch.from_numpy((pages.table.numpy()[rows, page] * np.int64(pages.size) + offset).ravel())


def chain_places(rows: Tensor, starts: Tensor, num_steps: int, pages: Pages) -> ChainPlaces:
    """Positions and slots of the draft steps of rounds `rows` [R] that start at `starts` [R]."""
    positions = starts.numpy() + _numbers(num_steps)[:, None]
    slots = _slots(pages, rows.numpy(), positions)
    return ChainPlaces(positions=torch.from_numpy(positions), slots=slots.view(positions.shape))


def chain_inputs(rows: Tensor, state: RowState, drafts: Tensor | None, pages: tuple[Pages, ...]) -> ChainInputs:
    """The target's batch of rounds `rows` [R]: each its last token, then its `drafts` [R, W - 1]."""
    at = rows.numpy()
    starts, tokens = state.lengths.numpy()[at], state.last_tokens.numpy()[at][:, None]
    if drafts is not None:
        tokens = np.concatenate([tokens, drafts.numpy()], axis=1)
    positions = starts[:, None] + _numbers(tokens.shape[1])
    return ChainInputs(
        starts=torch.from_numpy(starts),
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions.ravel()),
        slots=tuple(_slots(each, at[:, None], positions) for each in pages),
    )


def settle_chains(
    rows: Tensor, state: RowState, inputs: ChainInputs, drawn: Tensor, padding_row: int, pages: Pages
) -> SettledChains:
    """What rounds accept of `drawn` [R, W], the token drawn after each node; the row state is brought up to date."""
    at, tokens, found = rows.numpy(), inputs.tokens.numpy(), drawn.numpy()
    num_rounds, width = found.shape
    is_right = tokens[:, 1:] == found[:, :-1]
    lens = is_right.cumprod(axis=1).sum(axis=1) + 1 if width > 1 else np.ones(num_rounds, dtype=np.int64)
    number = _numbers(width)
    is_kept = number < lens[:, None]
    ends = np.where(at == padding_row, 0, inputs.starts.numpy() + lens)
    firsts = _numbers(num_rounds) * width
    last_pairs = firsts + lens - 1
    state.lengths.numpy()[at] = ends
    state.last_tokens.numpy()[at] = found.ravel()[last_pairs]
    result = np.empty((num_rounds, 2 + width), dtype=np.int64)
    result[:, 0], result[:, 1], result[:, 2:] = lens, ends, np.where(is_kept, found, NOTHING)
    pair_rows, positions = np.repeat(at, width), inputs.positions.numpy()
    return SettledChains(
        result=torch.from_numpy(result),
        nodes=torch.from_numpy(np.minimum(number, lens[:, None] - 1)),
        pair_rows=torch.from_numpy(pair_rows),
        pair_positions=inputs.positions,
        pair_tokens=torch.from_numpy(np.where(is_kept, found, 0).ravel()),
        pair_slots=_slots(pages, pair_rows, positions),
        last_pairs=torch.from_numpy(last_pairs),
    )
