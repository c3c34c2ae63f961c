"""A Hugging Face folder whose experts are in MXFP4: all of a layer's are found under one name, as floats.

32 numbers of 4 bits (one of sign, two of exponent, one of fraction) share a power of two: `NAME_blocks` has two of them
a byte, the first in the low bits, and `NAME_scales` the exponents, from -127 on. Bfloat16 has all of these numbers. One
tensor is read and dequantised when it is looked up, an expert at a time. Called by `load`.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.models.parts import Shape, covering, cut
from roost.text.language import Language
from roost.weights.folder import Folder
from roost.weights.header import FLOATS
from roost.weights.quantisation import Quantisation
from roost.weights.source import Source

BLOCK_BYTES = 16  # two numbers each
_BLOCKS, _SCALES = "_blocks", "_scales"
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
_EXPONENT_OFFSET = 127


class Mxfp4Folder(Source):
    """The tensors of such a folder, as a checkpoint in bfloat16 would have them."""

    def __init__(self, folder: Path, quantisation: Quantisation) -> None:
        self._folder = Folder(folder, allowed=_dtypes)
        self._quantised = [name.removesuffix(_BLOCKS) for name in self._folder if name.endswith(_BLOCKS)]
        if not self._quantised:
            raise ConfigError(f"{folder} has no tensor whose name ends in {_BLOCKS}, but its config says mxfp4")
        parts = {f"{name}{part}" for name in self._quantised for part in (_BLOCKS, _SCALES)}
        self._plain = [name for name in self._folder if name not in parts]
        for name in self._quantised:
            if f"{name}{_SCALES}" not in self._folder:
                raise ConfigError(f"the checkpoint has no tensor {name}{_SCALES}")
            if quantisation.ignores(name):
                raise ConfigError(f"the checkpoint's {name} is quantised, although its config lists it as left out")

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._quantised:
            return self._folder[name]
        return self._dequantised(name, self._folder[f"{name}{_BLOCKS}"], self._folder[f"{name}{_SCALES}"])

    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor: blocks are read whole."""
        if name not in self._quantised:
            return self._folder.part(name, shape)
        experts, in_len, out_len = shape
        num_blocks, inner = covering(in_len, 2 * BLOCK_BYTES)
        stored = experts, out_len, num_blocks
        blocks = self._folder.part(f"{name}{_BLOCKS}", (*stored, BLOCK_BYTES))
        found = self._dequantised(name, blocks, self._folder.part(f"{name}{_SCALES}", stored))
        return cut(found, (found.shape[0], inner, found.shape[2]))

    @staticmethod
    def _dequantised(name: str, blocks: Tensor, scales: Tensor) -> Tensor:
        if blocks.ndim != 4 or blocks.shape[3] != BLOCK_BYTES or blocks.shape[:3] != scales.shape:
            raise ConfigError(
                f"the checkpoint's {name}{_BLOCKS} and {_SCALES} are {list(blocks.shape)} and {list(scales.shape)}; "
                f"they must be [experts, outputs, blocks, {BLOCK_BYTES}] and [experts, outputs, blocks]"
            )
        return dequantise(blocks, scales).transpose(1, 2)  # in bfloat16 inputs come before outputs

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._quantised

    def __len__(self) -> int:
        return len(self._plain) + len(self._quantised)

    def config(self) -> dict[str, object]:
        """The contents of config.json."""
        return self._folder.config()

    def language(self) -> Language:
        """Its tokenizer and chat template."""
        return self._folder.language()

    def warnings(self) -> tuple[str, ...]:
        """That the experts take more memory than in the file."""
        return ("nothing here computes with MXFP4 weights: the checkpoint's experts are dequantised",)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of blocks [num_experts, out, num_blocks, 16]: bfloat16 [num_experts, out, 32 * num_blocks]."""
    pairs = torch.tensor([(_NUMBERS[byte & 15], _NUMBERS[byte >> 4]) for byte in range(256)], dtype=torch.bfloat16)
    powers = torch.tensor([2.0 ** (each - _EXPONENT_OFFSET) for each in range(256)], dtype=torch.bfloat16)
    whole = torch.empty((*scales.shape, 2 * BLOCK_BYTES), dtype=torch.bfloat16)
    for own, block, scale in zip(whole, blocks, scales, strict=True):
        torch.mul(pairs[block.int()].flatten(2), powers[scale.int()][..., None], out=own)
    return whole.flatten(2)


def _dtypes(name: str) -> tuple[str, ...]:
    return ("U8",) if name.endswith((_BLOCKS, _SCALES)) else FLOATS
