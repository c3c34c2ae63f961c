"""Buffers: how many entries each buffer of a CUDA graph of rounds needs, stated once.

A graph is checked against them when it is captured, and before every replay; tests check the layouts and the branches
of eager steps, too. Integers only. Called by the graphs of rounds.
"""

from dataclasses import dataclass, fields

from roost.errors import InvariantError
from roost.spec_shape import SpecShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSizes:
    """Entries of each buffer, for a number of rounds."""

    rows: int
    nodes: int  # tokens of the target's pass: width of each round
    mask: int  # which node sees which: T by T, where rounds are trees
    drafts: int  # tokens of one draft step: K of each round
    moves: int  # slots that change branches after the last draft step but one: K paths of the steps before it
    pairs: int  # tokens of draft-extend: S + 1 of each round
    accepted: int  # tokens that a round can add


def round_sizes(number: int, width: int, shape: SpecShape) -> BufferSizes:
    """What `number` rounds of `width` nodes need."""
    drafts = width > 1 and shape.pair
    branches = shape.topk > 1 and drafts
    accept_max = shape.accept_max_of(width)
    return BufferSizes(
        rows=number,
        nodes=number * width,
        mask=number * width**2 if shape.topk > 1 and width > 1 else 0,
        drafts=number * shape.topk if drafts else 0,
        moves=number * shape.topk * max(0, accept_max - 3) if branches else 0,
        pairs=number * accept_max,
        accepted=number * accept_max,
    )


def check_fits(needed: BufferSizes, held: BufferSizes, what: str) -> None:
    """Refuse a launch that would touch more than a buffer holds."""
    for field in fields(BufferSizes):
        wants, has = getattr(needed, field.name), getattr(held, field.name)
        if wants > has:
            raise InvariantError(f"{what}: {field.name} needs {wants} entries and the buffer holds {has}")
