"""A packing: which tensors a quantised projection is made of, and how they become a weight.

One record for each way in which checkpoints name and lay out such tensors. Defined beside its reader (`fp8_formats`,
…), listed and used by `quantised_folder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from roost.layers.quantised import QuantisedWeight
from roost.weights.quantisation import Quantisation

Parts = Mapping[str, Tensor]  # by the last word of their names, all on one device


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the outputs, or the inputs, of a matrix lie in a tensor."""

    dim: int
    unit: int = 1  # of them for one entry


Axes = tuple[Axis | None, Axis | None]  # outputs and inputs; None: an entry is for all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How one kind of checkpoint keeps quantised projections."""

    # last word of a tensor's name -> the types, as safetensors names them, that it may have besides those of floats
    parts: Mapping[str, tuple[str, ...]]
    marks: tuple[str, ...]  # a module with one of these parts is quantised
    read: Callable[[Parts, Quantisation], QuantisedWeight]  # raises ConfigError where parts are missing or do not fit
    axes: Callable[[str, tuple[int, ...], Quantisation], Axes]  # of a part, from its name and its shape
    of_all: tuple[str, ...] = ()  # parts that say something of a whole matrix alone, and may be missing
    unused: tuple[str, ...] = ()  # last words of tensors that are left out: they follow from others or are replaced
