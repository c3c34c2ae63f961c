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


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How one kind of checkpoint keeps quantised projections."""

    # last word of a tensor's name -> the types, as safetensors names them, that it may have besides those of floats
    parts: Mapping[str, tuple[str, ...]]
    marks: tuple[str, ...]  # a module with one of these parts is quantised
    read: Callable[[Parts, Quantisation], QuantisedWeight]  # raises ConfigError where parts are missing or do not fit
    unused: tuple[str, ...] = ()  # last words of tensors that are left out: they follow from others or are replaced
