"""The index arithmetic of rounds that are chains, in plain Python, for tensors that are in the host's memory.

The numbers are those of `layers.rounds`. They are few, and after a pass of the model the caches are cold: every torch
or numpy operation has code of its own to fetch, and torch's give up the interpreter, for which other threads wait. A
loop over the rounds takes less, however many there are beside a CPU's pass. Called through `Ops`, on a CPU.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from roost.layers.rounds import NOTHING, ChainInputs, ChainPlaces, Pages, RowState, SettledChains


def chain_places(rows: Tensor, starts: Tensor, num_steps: int, pages: Pages) -> ChainPlaces:
    """Positions and slots of the draft steps of rounds `rows` [R] that start at `starts` [R]."""
    firsts = starts.tolist()
    slots = [_slots(pages, row, start, num_steps) for row, start in zip(rows.tolist(), firsts, strict=True)]
    positions = [[start + step for start in firsts] for step in range(num_steps)]
    return ChainPlaces(
        positions=_integers(_joined(positions), num_steps, len(firsts)),
        slots=_integers(_joined(zip(*slots, strict=True)), num_steps, len(firsts)),
    )


def chain_inputs(rows: Tensor, state: RowState, drafts: Tensor | None, pages: tuple[Pages, ...]) -> ChainInputs:
    """The target's batch of rounds `rows` [R]: each its last token, then its `drafts` [R, W - 1]."""
    at, lengths, last_tokens = rows.tolist(), state.lengths.numpy(), state.last_tokens.numpy()
    drafted = [[]] * len(at) if drafts is None else drafts.tolist()
    width = 1 if drafts is None else 1 + drafts.shape[1]
    starts = [lengths.item(row) for row in at]
    tokens = [[last_tokens.item(row), *own] for row, own in zip(at, drafted, strict=True)]
    return ChainInputs(
        starts=_integers(starts),
        tokens=_integers(_joined(tokens), len(at), width),
        positions=_integers(_joined(range(start, start + width) for start in starts)),
        slots=tuple(
            _integers(_joined(_slots(each, row, start, width) for row, start in zip(at, starts, strict=True)))
            for each in pages
        ),
    )


def settle_chains(
    rows: Tensor, state: RowState, inputs: ChainInputs, drawn: Tensor, padding_row: int, pages: Pages
) -> SettledChains:
    """What rounds accept of `drawn` [R, W], the token drawn after each node; the row state is brought up to date."""
    at, width, lengths, last_tokens = rows.tolist(), drawn.shape[1], state.lengths.numpy(), state.last_tokens.numpy()
    result: list[int] = []
    nodes: list[int] = []
    pair_tokens: list[int] = []
    pair_slots: list[int] = []
    last_pairs: list[int] = []
    chains = zip(at, inputs.starts.tolist(), inputs.tokens.tolist(), drawn.tolist(), strict=True)
    for number, (row, start, tokens, found) in enumerate(chains):
        num_kept = 1
        while num_kept < width and tokens[num_kept] == found[num_kept - 1]:
            num_kept += 1
        end = 0 if row == padding_row else start + num_kept
        lengths[row], last_tokens[row] = end, found[num_kept - 1]
        kept, num_void = found[:num_kept], width - num_kept
        result += [num_kept, end, *kept, *[NOTHING] * num_void]
        nodes += [*range(num_kept), *[num_kept - 1] * num_void]
        pair_tokens += [*kept, *[0] * num_void]
        pair_slots += _slots(pages, row, start, width)
        last_pairs.append(number * width + num_kept - 1)
    return SettledChains(
        result=_integers(result, len(at), 2 + width),
        nodes=_integers(nodes, len(at), width),
        pair_rows=_integers([row for row in at for _ in range(width)]),
        pair_positions=inputs.positions,
        pair_tokens=_integers(pair_tokens),
        pair_slots=_integers(pair_slots),
        last_pairs=_integers(last_pairs),
    )


def _slots(pages: Pages, row: int, start: int, count: int) -> list[int]:
    """Slots of the positions from `start` on, in a row."""
    size, table = pages.size, pages.table.numpy()
    return [table.item(row, position // size) * size + position % size for position in range(start, start + count)]


def _joined(lists: Iterable[Sequence[int]]) -> list[int]:
    return [number for each in lists for number in each]


def _integers(numbers: list[int], *shape: int) -> Tensor:
    """A tensor of a shape; without one, of as many numbers as there are."""
    column = np.array(numbers, dtype=np.int64)
    return torch.from_numpy(column.reshape(shape) if shape else column)
