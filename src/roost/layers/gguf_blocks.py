"""GGUF's blocks: 32 neighbouring inputs of an output with a float16 scale, as Q4_0, Q4_1 and Q8_0 store them.

A block is its scale, its minimum (Q4_1 alone) and then the values: of 4 bits, the low halves of 16 bytes and after
them the high halves; or 32 bytes with sign. Kept as the file has them until they become floats or a projection, so that
rows can be reordered whole. Made by the reader of GGUF files; called by `layers.linear`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from roost.layers.grouped import GroupedMatrix, pack
from roost.layers.quantised import QuantisedWeight

BLOCK_LEN = 32
_STEPS = 127  # of a token's scale, on either side of zero
_SCALE_LEAST = 1e-30  # of a block of zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """The layout of a block."""

    bits: int
    has_minimum: bool

    @property
    def num_floats(self) -> int:
        """Its float16 numbers: the scale, and the minimum where it has one."""
        return 1 + self.has_minimum

    @property
    def num_bytes(self) -> int:
        """Bytes of a block: float16 numbers, then the values."""
        return 2 * self.num_floats + BLOCK_LEN * self.bits // 8


BLOCK_KINDS = {
    "Q4_0": BlockKind(bits=4, has_minimum=False),
    "Q4_1": BlockKind(bits=4, has_minimum=True),
    "Q8_0": BlockKind(bits=8, has_minimum=False),
}


@dataclass(frozen=True, slots=True, eq=False)
class GgufLinear:
    """A projection of tokens that are rounded, too: each block of 32 numbers to int8 with a scale of its own."""

    weight: "GgufWeight"
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out], in float32."""
        return linear(_rounded(hidden), self.weight.dequantise(), self.bias)

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, as floats: of a head, the embedding of its tokens."""
        return GgufWeight(blocks=self.weight.blocks[outputs], kind=self.weight.kind).dequantise()


def _rounded(hidden: Tensor) -> Tensor:
    blocks = hidden.unflatten(-1, (-1, BLOCK_LEN))
    scales = blocks.abs().amax(dim=-1, keepdim=True).clamp_(min=_SCALE_LEAST).mul_(1 / _STEPS)
    return (blocks / scales).round_().mul_(scales).flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufWeight(QuantisedWeight):
    """Rows of blocks."""

    form: ClassVar[str] = "gguf"

    blocks: Tensor  # [out_len, num_blocks, bytes of a block] uint8
    kind: BlockKind

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.blocks.shape[0], self.blocks.shape[1] * BLOCK_LEN

    def matrix(self) -> GroupedMatrix:
        """Values, scales and minimums, apart."""
        num_floats, num_values = self.kind.num_floats, BLOCK_LEN * self.kind.bits // 8  # float16 numbers, bytes
        floats = (
            self.blocks[..., : 2 * num_floats].contiguous().view(torch.float16)
        )  # [out_len, num_blocks, num_floats]
        stored = self.blocks[..., -num_values:]
        # of 8 bits: from two's complement to 128 more than the number
        values = torch.cat([stored & 15, stored >> 4], dim=-1) if self.kind.bits == 4 else stored ^ 128
        return GroupedMatrix(
            values=values.flatten(1),
            scales=floats[..., 0].contiguous(),
            minimums=floats[..., 1].contiguous() if self.kind.has_minimum else None,
            bits=self.kind.bits,
        )

    def dequantise(self) -> Tensor:
        """The floats that it stands for."""
        return self.matrix().dequantise()

    @classmethod
    def stack(cls, weights: Sequence[Self]) -> Self | None:
        """One matrix of several; None where their kinds differ."""
        if len({(each.kind, each.blocks.shape[1]) for each in weights}) > 1:
            return None
        return cls(blocks=torch.cat([each.blocks for each in weights]), kind=weights[0].kind)

    def linear(self, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The projection by a kernel that reads the blocks, repacked; on a CPU the reference of such a kernel."""
        if self.blocks.device.type == "cpu":
            return GgufLinear(self, bias)
        from roost.kernels.grouped_linear import GroupedLinear  # noqa: PLC0415 (Triton is only there where GPUs are)

        return GroupedLinear(pack(self.matrix()), bias)
