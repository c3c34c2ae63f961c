"""A Hugging Face folder with quantised projections: each is found as a matrix under its name, `….weight`.

The tensors that a projection is made of (values, scales, zero points) are not listed beside it. Which modules are
quantised is read from the tensors, and must agree with the config. Every tensor is part of a projection, left out by
its packing's rule, or listed as it is. Called by `load`.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.quantised import QuantisedWeight
from roost.models.parts import Cut, Length, Shape, cut_unit, in_units
from roost.text.language import Language
from roost.weights.folder import Folder
from roost.weights.fp8_formats import FP8_PACKING
from roost.weights.header import FLOATS
from roost.weights.int4_formats import AWQ_PACKING, COMPRESSED_PACKING, GPTQ_PACKING
from roost.weights.packing import Packing
from roost.weights.quantisation import Quantisation
from roost.weights.source import Source

PACKINGS: dict[tuple[str, str], Packing] = {  # by the form of the weights and the packing's name
    ("fp8", "fp8"): FP8_PACKING,
    ("fp8", "fbgemm_fp8"): FP8_PACKING,
    ("fp8", "compressed-tensors"): FP8_PACKING,
    ("int4", "awq"): AWQ_PACKING,
    ("int4", "gptq"): GPTQ_PACKING,
    ("int4", "gptq_v2"): GPTQ_PACKING,
    ("int4", "compressed-tensors"): COMPRESSED_PACKING,
}


class QuantisedFolder(Source):
    """The tensors of a folder whose projections are quantised; each is read from disk when it is looked up."""

    def __init__(self, folder: Path, quantisation: Quantisation) -> None:
        self._quantisation, self._packing = quantisation, _packing(quantisation)
        self._folder = Folder(folder, allowed=self._dtypes)
        modules = {_module(name) for name in self._folder if _part(name) in self._packing.marks}
        self._parts: dict[str, dict[str, str]] = {module: {} for module in sorted(modules)}
        self._plain: list[str] = []
        for name in self._folder:
            if _module(name) in modules and _part(name) in self._packing.parts:
                self._parts[_module(name)][_part(name)] = name
            elif _part(name) not in self._packing.unused:
                self._plain.append(name)
        self._seen = {_root(module) for module in self._parts}
        for module in self._parts:
            if quantisation.ignores(module):
                raise ConfigError(f"the checkpoint's {module} is quantised, although its config lists it as left out")

    @property
    def form(self) -> str:
        """The form of its projections, as --weights names it."""
        return self._quantisation.form

    def quantised(self, name: str, device: torch.device, shape: Shape | None = None) -> QuantisedWeight | None:
        """The matrix `name` as it is kept; one that the config says is quantised, and is not, is refused.

        Not so in a part that quantisers leave out as a whole, whether or not they say so: LM heads, MTP heads.
        """
        module = _module(name)
        if module not in self._parts:
            is_left_out = self._parts and _root(module) not in self._seen
            if self._quantisation.covers(module) and not is_left_out:
                raise ConfigError(
                    f"the checkpoint's {name} has no {' or '.join(self._packing.marks)}, and its config does not list "
                    f"it as left out of the quantisation"
                )
            return None
        try:
            tensors = {part: each.to(device) for part, each in self._tensors(module, shape)}
            return self._packing.read(tensors, self._quantisation)
        except ConfigError as error:
            raise ConfigError(f"the checkpoint's {module}: {error}") from error

    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor; nothing else of it is read."""
        if _part(name) != "weight" or _module(name) not in self._parts:
            return self._folder.part(name, shape)
        weight = self.quantised(name, torch.device("cpu"), shape)
        assert weight is not None
        return weight.dequantise()

    def _tensors(self, module: str, shape: Shape | None) -> Iterator[tuple[str, Tensor]]:
        """The parts of a projection, as they are or as a shape of outputs and inputs says."""
        for part, name in self._parts[module].items():
            if shape is None:
                yield part, self._folder[name]
            elif part not in self._packing.of_all:
                yield part, self._folder.part(name, self._stored_shape(part, name, shape))

    def _stored_shape(self, part: str, name: str, shape: Shape) -> Shape:
        """What to read of one part for a shape of outputs and inputs."""
        found: list[Length] = list(self._folder.shape(name))
        axes = self._packing.axes(part, self._folder.shape(name), self._quantisation)
        for what, length, axis in zip(("outputs", "inputs"), shape, axes, strict=True):
            if axis is not None and isinstance(length, Cut):
                units = in_units(length, axis.unit)
                if units is None:
                    raise cut_unit(name, length, axis.unit, what)
                found[axis.dim] = units
        return tuple(found)

    def __getitem__(self, name: str) -> Tensor:
        if _part(name) == "weight" and _module(name) in self._parts:
            weight = self.quantised(name, torch.device("cpu"))
            assert weight is not None
            return weight.dequantise()
        return self._folder[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from (f"{module}.weight" for module in self._parts)

    def __len__(self) -> int:
        return len(self._plain) + len(self._parts)

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return self._folder.config()

    def language(self) -> Language:
        """Its tokenizer and chat template."""
        return self._folder.language()

    def warnings(self) -> tuple[str, ...]:
        """What of the checkpoint is not used."""
        said = []
        if self._quantisation.activations == "static":
            said.append("the checkpoint's scales of activations are not used: each token is scaled by its own largest")
        if self._quantisation.kv_scales:
            said.append("the checkpoint's scales of keys and values are not used")
        return tuple(said)

    def _dtypes(self, name: str) -> tuple[str, ...]:
        return (*FLOATS, *self._packing.parts.get(_part(name), ()))


def _packing(quantisation: Quantisation) -> Packing:
    key = (quantisation.form, quantisation.packing)
    if key not in PACKINGS:
        known = ", ".join(f"{form} of {packing}" for form, packing in PACKINGS)
        raise ConfigError(f"config.json: {key[0]} weights of {key[1]} are not supported; supported are {known}")
    return PACKINGS[key]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _root(name: str) -> str:
    """Of what part of a checkpoint it is: `model`, `lm_head`, `mtp`."""
    return name.partition(".")[0]


def _part(name: str) -> str:
    return name.rpartition(".")[2]
