"""Parts of tensors: which rows or columns of a matrix a rank keeps, and how they are cut out of what is stored.

A shape may have a `Cut` in the place of a length: whoever reads a tensor of that shape reads that part alone. Stored
tensors may count in units, as blocks and groups of weights do. Called by models, and by the readers of checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from roost.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """Which entries along a dimension."""

    whole: int  # how many there are
    runs: tuple[tuple[int, int], ...]  # [start, end) of those that are read, one behind the other

    @property
    def length(self) -> int:
        """How many are read."""
        return sum(end - start for start, end in self.runs)


Length = int | Cut
Shape = tuple[Length, ...]


class Stored(Protocol):
    """A tensor, or what is one once it is indexed."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The entries of some slices."""
        ...


def part(own: int, number: int, count: int, sections: Sequence[int] = ()) -> Length:
    """Part `number` of `count` alike with `own` entries each; of sections, it is that of each, one behind the other.

    `sections` are the entries that the part has of each.
    """
    if count == 1:
        return own
    runs, start = [], 0
    for each in sections or (own,):
        runs.append((start + number * each, start + (number + 1) * each))
        start += count * each
    return Cut(start, tuple(runs))


def split(whole: int, number: int, count: int) -> Length:
    """Part `number` of `count`; where these cannot be alike, the last one is shorter."""
    if count == 1:
        return whole
    own = -(-whole // count)
    return Cut(whole, ((number * own, min((number + 1) * own, whole)),))


def lengths(shape: Shape) -> tuple[int, ...]:
    """The shape of what is read."""
    return tuple(each if isinstance(each, int) else each.length for each in shape)


def whole(shape: Shape) -> tuple[int, ...]:
    """The shape of what it is read from."""
    return tuple(each if isinstance(each, int) else each.whole for each in shape)


def is_whole(shape: Shape) -> bool:
    """Whether nothing is left out."""
    return all(isinstance(each, int) for each in shape)


def cut(stored: Stored, shape: Shape) -> Tensor:
    """What a shape says of a stored tensor."""
    places = [((0, each),) if isinstance(each, int) else each.runs for each in shape]
    dim = next((number for number, runs in enumerate(places) if len(runs) > 1), 0)
    assert all(len(runs) == 1 for number, runs in enumerate(places) if number != dim), shape
    slices = [slice(*runs[0]) for runs in places]
    found = [stored[(*slices[:dim], slice(*run), *slices[dim + 1 :])] for run in places[dim]]
    return found[0] if len(found) == 1 else torch.cat(found, dim=dim)


def in_units(length: Length, unit: int) -> Length | None:
    """The same in units of so many entries, of which the last may be cut off; None where a part would cut one."""
    if isinstance(length, int):
        return -(-length // unit)
    if any(start % unit or (end % unit and end < length.whole) for start, end in length.runs):
        return None
    return Cut(-(-length.whole // unit), tuple((start // unit, -(-end // unit)) for start, end in length.runs))


def covering(length: Length, unit: int) -> tuple[Length, Length]:
    """The units in which a part lies, and the part among their entries."""
    if isinstance(length, int):
        return -(-length // unit), length
    units, inner, start_of = [], [], 0
    for start, end in length.runs:
        first, last = start // unit, -(-end // unit)
        units.append((first, last))
        inner.append((start_of + start - first * unit, start_of + end - first * unit))
        start_of += (last - first) * unit
    return Cut(-(-length.whole // unit), tuple(units)), Cut(start_of, tuple(inner))


def check_shape(name: str, found: Sequence[int], expected: Shape) -> None:
    """Refuse a stored tensor that is not of a shape."""
    if tuple(found) != whole(expected):
        raise ConfigError(f"the checkpoint's {name} is {list(found)}, its config says {list(whole(expected))}")


def cut_unit(name: str, length: Cut, unit: int, what: str) -> ConfigError:
    """The refusal of a part that would cut a unit; `what` is counted: inputs or outputs."""
    allowed = [number for number in range(1, length.whole // unit + 1) if length.whole % (number * unit) == 0]
    return ConfigError(
        f"--tp: the checkpoint's {name} has {length.whole} {what} in groups of {unit}, which a rank's {length.length} "
        f"would cut; these {what} can be split over {named(allowed)} ranks"
    )


def named(numbers: Sequence[int]) -> str:
    """Numbers that an option may be."""
    shown = [str(each) for each in numbers]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
