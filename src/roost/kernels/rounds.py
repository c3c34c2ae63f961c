"""The index arithmetic of rounds that are chains of one width, in one kernel before the target's pass and one after it.

`chain_inputs`: from rows to the tokens, positions and slots of the target's batch; `chain_places`: those of a draft
head's passes. `settle_chains`: from the tokens
drawn after each node to what each round accepted, what the host is told, the row state, and the pairs that a drafter
takes over. A program is one round; W nodes lie next to each other in the batch. Moves a few numbers a round. Their
references are in `layers.rounds`. Called by the forward passes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.layers.rounds import ChainInputs, ChainPlaces, Pages, RowState, SettledChains

_BLOCK = 64  # rounds of a program that only looks up slots


def chain_inputs(rows: Tensor, state: RowState, drafts: Tensor | None, pages: tuple[Pages, ...]) -> ChainInputs:
    """The target's batch of rounds `rows` [R]: each its last token, then its `drafts` [R, W - 1]."""
    num_rounds, width = len(rows), 1 if drafts is None else 1 + drafts.shape[1]
    assert rows.is_contiguous() and 1 <= len(pages) <= 2 and (drafts is None or drafts.stride(1) == 1)
    starts = torch.empty_like(rows)
    columns = rows.new_empty((2 + len(pages), num_rounds, width))
    first, second = pages[0], pages[-1]
    if num_rounds:
        _chain_inputs[(num_rounds,)](
            *(rows, state.lengths, state.last_tokens, drafts, starts, columns, first.table, second.table),
            *(0 if drafts is None else drafts.stride(0), first.table.stride(0), second.table.stride(0), num_rounds),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            NUM_BOOKS=len(pages),
            PAGE_SIZE=first.size,
            num_warps=1,
        )
    tokens, positions, *slots = columns.unbind(0)
    return ChainInputs(
        starts=starts, tokens=tokens, positions=positions.flatten(), slots=tuple(each.flatten() for each in slots)
    )


def chain_places(rows: Tensor, starts: Tensor, num_steps: int, pages: Pages) -> ChainPlaces:
    """Positions and slots of the draft steps of rounds `rows` [R] that start at `starts` [R]."""
    num_rounds = len(rows)
    assert rows.is_contiguous() and starts.is_contiguous()
    columns = rows.new_empty((2, num_steps, num_rounds))
    if num_rounds and num_steps:
        _chain_places[(triton.cdiv(num_rounds, _BLOCK), num_steps)](
            *(rows, starts, columns, pages.table, pages.table.stride(0), num_rounds),
            PAGE_SIZE=pages.size,
            BLOCK=_BLOCK,
            num_warps=1,
        )
    return ChainPlaces(positions=columns[0], slots=columns[1])


def settle_chains(
    rows: Tensor, state: RowState, inputs: ChainInputs, drawn: Tensor, padding_row: int, pages: Pages
) -> SettledChains:
    """What rounds accept of `drawn` [R, W], the token drawn after each node; the row state is brought up to date."""
    num_rounds, width = inputs.tokens.shape
    assert rows.is_contiguous() and inputs.tokens.stride(1) == 1 and drawn.is_contiguous()
    result = rows.new_empty((num_rounds, 2 + width))
    columns = rows.new_empty((5, num_rounds, width))
    last_pairs = torch.empty_like(rows)
    if num_rounds:
        _settle_chains[(num_rounds,)](
            *(rows, state.lengths, state.last_tokens, inputs.starts, inputs.tokens, drawn),
            *(result, columns, last_pairs, pages.table),
            *(inputs.tokens.stride(0), pages.table.stride(0), num_rounds, padding_row),
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            PAGE_SIZE=pages.size,
            num_warps=1,
        )
    nodes, pair_rows, positions, tokens, slots = columns.unbind(0)
    return SettledChains(
        result=result,
        nodes=nodes,
        pair_rows=pair_rows.flatten(),
        pair_positions=positions.flatten(),
        pair_tokens=tokens.flatten(),
        pair_slots=slots.flatten(),
        last_pairs=last_pairs,
    )


@triton.jit
def _slot(table, row, row_stride, position, is_in, PAGE_SIZE: tl.constexpr):
    page = tl.load(table + row * row_stride + position // PAGE_SIZE, mask=is_in, other=0).to(tl.int64)
    return page * PAGE_SIZE + position % PAGE_SIZE


@triton.jit(do_not_specialize=["num_rounds"], do_not_specialize_on_alignment=["rows", "starts", "columns"])
def _chain_places(rows, starts, columns, table, row_stride, num_rounds, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    number = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    is_in, step = number < num_rounds, tl.program_id(1)
    row = tl.load(rows + number, mask=is_in, other=0)
    position = tl.load(starts + number, mask=is_in, other=0) + step
    cell = step.to(tl.int64) * num_rounds + number
    tl.store(columns + cell, position, mask=is_in)
    slot = _slot(table, row, row_stride, position, is_in, PAGE_SIZE)
    tl.store(columns + tl.num_programs(1).to(tl.int64) * num_rounds + cell, slot, mask=is_in)


@triton.jit(do_not_specialize=["num_rounds"], do_not_specialize_on_alignment=["rows", "drafts", "starts", "columns"])
def _chain_inputs(
    rows,
    lengths,
    last_tokens,
    drafts,  # [num_rounds, WIDTH - 1], or None
    starts,
    columns,  # [2 + NUM_BOOKS, num_rounds, WIDTH]: tokens, positions, slots of each book
    table,
    second_table,
    draft_stride,
    row_stride,
    second_stride,
    num_rounds,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BOOKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    start, root = tl.load(lengths + row), tl.load(last_tokens + row)
    tl.store(starts + number, start)
    node = tl.arange(0, BLOCK).to(tl.int64)
    is_in = node < WIDTH
    token = tl.where(node == 0, root, 0)
    if drafts is not None:
        drafted = tl.load(drafts + number * draft_stride + node - 1, mask=is_in & (node > 0), other=0)
        token = tl.where(node == 0, root, drafted)
    position, cell = start + node, number * WIDTH + node
    column = tl.num_programs(0).to(tl.int64) * WIDTH
    tl.store(columns + cell, token, mask=is_in)
    tl.store(columns + column + cell, position, mask=is_in)
    slot = _slot(table, row, row_stride, position, is_in, PAGE_SIZE)
    tl.store(columns + 2 * column + cell, slot, mask=is_in)
    if NUM_BOOKS == 2:
        slot = _slot(second_table, row, second_stride, position, is_in, PAGE_SIZE)
        tl.store(columns + 3 * column + cell, slot, mask=is_in)


@triton.jit(
    do_not_specialize=["num_rounds", "padding_row"],
    do_not_specialize_on_alignment=["rows", "starts", "tokens", "sampled", "result", "columns", "last_pairs"],
)
def _settle_chains(
    rows,
    lengths,
    last_tokens,
    starts,
    tokens,  # [num_rounds, WIDTH] the nodes
    sampled,  # [num_rounds, WIDTH]
    result,  # [num_rounds, 2 + WIDTH]
    columns,  # [5, num_rounds, WIDTH]: nodes, then rows, positions, tokens and slots of pairs
    last_pairs,
    table,
    token_stride,
    row_stride,
    num_rounds,
    padding_row,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row, start = tl.load(rows + number), tl.load(starts + number)
    node = tl.arange(0, BLOCK).to(tl.int64)
    is_in, cell = node < WIDTH, number * WIDTH + node
    drawn = tl.load(sampled + cell, mask=is_in, other=-1)
    following = tl.load(tokens + number * token_stride + node + 1, mask=node + 1 < WIDTH, other=-1)
    is_wrong = (node + 1 >= WIDTH) | (following != drawn)  # what follows the node is not what was drawn after it
    length = tl.min(tl.where(is_wrong, node + 1, BLOCK), 0)  # the first such node's token is the bonus
    is_kept = node < length
    end = tl.where(row == padding_row, 0, start + length)
    tl.store(lengths + row, end)
    tl.store(last_tokens + row, tl.sum(tl.where(node == length - 1, drawn, 0), 0))
    line = result + number * (2 + WIDTH)
    tl.store(line, length)
    tl.store(line + 1, end)
    tl.store(line + 2 + node, tl.where(is_kept, drawn, -1), mask=is_in)
    tl.store(last_pairs + number, number * WIDTH + length - 1)
    column = tl.num_programs(0).to(tl.int64) * WIDTH
    position = start + node
    tl.store(columns + cell, tl.minimum(node, length - 1), mask=is_in)
    tl.store(columns + column + cell, row + 0 * node, mask=is_in)
    tl.store(columns + 2 * column + cell, position, mask=is_in)
    tl.store(columns + 3 * column + cell, tl.where(is_kept, drawn, 0), mask=is_in)
    tl.store(columns + 4 * column + cell, _slot(table, row, row_stride, position, is_in, PAGE_SIZE), mask=is_in)
