"""Batches of the gated delta rule made by hand: rows that start from kept states, chunks, rounds and trees.

Used by the tests of each kernel, beside the reference.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from roost.layers.gated_delta import NOT_KEPT, DeltaShape, DeltaWeights, Recurrence, Replay, gated_delta
from roost.layers.rounds import Pages
from tests.support.segments import make_segments

Run = Callable[[Tensor, DeltaWeights, Recurrence], Tensor]

SHAPES = [
    DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_len=4),
    DeltaShape(num_key_heads=1, num_value_heads=1, key_dim=12, value_dim=40, conv_len=3),
    DeltaShape(num_key_heads=2, num_value_heads=2, key_dim=16, value_dim=64, conv_len=2),
]
PAGE_SIZE, NUM_PAGES, NUM_STATES = 4, 24, 9
ROWS = [2, 0, 1]
PARENTS = [-1, 0, 0, 1, 2, 3]


def weights_of(shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> DeltaWeights:
    """Random ones."""
    generator = torch.Generator().manual_seed(2)
    return DeltaWeights(
        shape=shape,
        conv=torch.randn(shape.conv_len, shape.num_channels, generator=generator).to(device, dtype),
        decay=-torch.rand(shape.num_value_heads, generator=generator).to(device),
        forget_bias=torch.randn(shape.num_value_heads, generator=generator).to(device),
    )


def memory(shape: DeltaShape, dtype: torch.dtype, device: torch.device, replay: Replay) -> Recurrence:
    """Random inputs in slots and random states; the null state is zero."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(NUM_PAGES * PAGE_SIZE, shape.input_len, generator=generator)
    states = torch.randn(NUM_STATES, shape.num_value_heads, shape.key_dim, shape.value_dim, generator=generator)
    tails = torch.randn(NUM_STATES, shape.conv_len - 1, shape.num_channels, generator=generator)
    states[0], tails[0] = 0, 0
    return Recurrence(
        replay=replay,
        inputs=inputs.to(device, dtype),
        states=states.to(device),
        tails=tails.to(device, dtype),
    )


def replay_of(starts: list[int], lens: list[int], device: torch.device, *, trees: bool = False) -> Replay:
    """Rows that start from several states, some of which keep new ones."""
    nodes = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            nodes[node] = nodes[parent]
        nodes[node, node] = True
    depths = nodes.sum(dim=1) - 1
    found = (depths.repeat(len(ROWS), 1).to(device), nodes.repeat(len(ROWS), 1, 1).to(device)) if trees else None
    segments = make_segments(ROWS, starts, lens, trees=found, are_rounds=trees, device=device)
    table = torch.arange(1, 1 + 3 * 7, dtype=torch.int32).view(3, 7)  # row by row
    pages = Pages(table=table.to(device), size=PAGE_SIZE)
    positions = [torch.arange(start, start + length) for start, length in zip(starts, lens, strict=True)]
    slots = [table[row, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for row, at in zip(ROWS, positions, strict=True)]
    return Replay(
        segments=segments,
        slots=torch.cat(slots).to(device, torch.int64),
        pages=pages,
        sources=torch.tensor([0, 3, 4], device=device),
        starts=torch.tensor([0, 5, 9], device=device),
        replayed_max=3,
        kept_at=torch.tensor([[1, NOT_KEPT], [7, 6], [NOT_KEPT, NOT_KEPT]], device=device),
        kept_in=torch.tensor([[5, 0], [6, 7], [0, 0]], device=device),
    )


def both(
    run: Run, shape: DeltaShape, dtype: torch.dtype, replay: Replay, num_tokens: int
) -> tuple[list[Tensor], list[Tensor]]:
    """What a kernel and the reference say and leave."""
    device = replay.slots.device
    weights, generator = weights_of(shape, dtype, device), torch.Generator().manual_seed(7)
    inputs = torch.randn(num_tokens, shape.input_len + 3, generator=generator).to(device, dtype)[:, : shape.input_len]
    found = []
    for each in (run, gated_delta):
        at = memory(shape, dtype, device, replay)
        found.append([each(inputs, weights, at), at.inputs, at.states, at.tails])
    return found[0], found[1]


def trees_of(device: torch.device) -> tuple[Replay, int]:
    """A tree for each row, and their nodes."""
    lens = [len(PARENTS)] * len(ROWS)
    return replay_of([2, 8, 9], lens, device, trees=True), sum(lens)


def assert_cuts_change_nothing(run: Run, shape: DeltaShape, device: torch.device) -> None:
    """A text that is cut anywhere, and goes on from any state, says the same bits."""
    length, dtype = 11, torch.float32
    weights, inputs = weights_of(shape, dtype, device), torch.randn(length, shape.input_len).to(device)
    pages = Pages(table=torch.arange(1, 8, dtype=torch.int32, device=device)[None], size=PAGE_SIZE)
    column = torch.tensor([0], device=device)
    at = memory(shape, dtype, device, replay_of([0, 7, 9], [1, 1, 1], device))

    def part(start: int, end: int, source: tuple[int, int], kept: int) -> Tensor:
        replay = Replay(
            segments=make_segments([0], [start], [end - start], are_rounds=False, device=device),
            slots=PAGE_SIZE + torch.arange(start, end, device=device),
            pages=pages,
            sources=column + source[0],
            starts=column + source[1],
            replayed_max=length,
            kept_at=column[:, None] + kept,
            kept_in=column[:, None] + 1,
        )
        return run(inputs[start:end], weights, replace(at, replay=replay))

    whole = part(0, length, (0, 0), NOT_KEPT)
    for cut in (1, 4, 7):
        for kept in {1, min(3, cut), cut}:
            first = part(0, cut, (0, 0), kept)
            assert torch.equal(torch.cat([first, part(cut, length, (1, kept), NOT_KEPT)]), whole), (cut, kept)


def assert_slots_need_not_be_there(run: Run, shape: DeltaShape, device: torch.device) -> None:
    """Of a chunk only the inputs that may be run again have slots; what it says is the same."""
    length = 9
    weights, inputs = weights_of(shape, torch.float32, device), torch.randn(length, shape.input_len).to(device)
    replay = replace(
        replay_of([0, 7, 9], [1, 1, 1], device),
        segments=make_segments([0], [0], [length], are_rounds=False, device=device),
        slots=torch.zeros(length, dtype=torch.int64, device=device),
        pages=Pages(table=torch.zeros((3, 7), dtype=torch.int32, device=device), size=PAGE_SIZE),
    )
    said = [each(inputs, weights, memory(shape, torch.float32, device, replay)) for each in (run, gated_delta)]
    torch.testing.assert_close(*said, rtol=1e-4, atol=1e-4)
