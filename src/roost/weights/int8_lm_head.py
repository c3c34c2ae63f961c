"""The LM head of a draft head in whole numbers of 8 bits, with a scale per token: how it is written, named and read.

config.json names it as compressed-tensors does. Half the bytes of bf16, for a vocabulary that is twice as large; beside
int8 weights the same numbers. Everybody else finds the floats that it stands for. Called by the loader of draft heads,
and by their training.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.models.parts import Shape
from roost.models.tensors import PartialState, read_part

NAME, SCALES = "lm_head.weight", "lm_head.weight_scale"
KEY = "quantization_config"  # of config.json
QUANTISATION: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["lm_head"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}
_STEPS = 127  # of a scale, on either side of zero
_SCALE_LEAST = 1e-30  # of a row of zeros


def rounded(weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a checkpoint for an LM head [num_tokens, hidden_size]."""
    weight = weight.to("cpu", torch.float32)
    scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=_SCALE_LEAST) / _STEPS
    return {NAME: (weight / scales).round().to(torch.int8), SCALES: scales}


def is_named_in(config: Mapping[str, object]) -> bool:
    """Whether a config.json says that its LM head is kept like this, and nothing else."""
    return config.get(KEY) == QUANTISATION


class WithFloats(PartialState):
    """The tensors of a checkpoint, its LM head among them as floats."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name in (NAME, SCALES):
            if name not in tensors:
                raise ConfigError(f"config.json: {KEY} says that the lm_head is rounded, but there is no {name}")
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        if name == SCALES:
            raise KeyError(name)
        tensor = self._tensors[name]
        return tensor if name != NAME else self._floats(tensor, self._tensors[SCALES])

    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor; nothing else of it is read."""
        tensor = read_part(self._tensors, name, shape)
        return tensor if name != NAME else self._floats(tensor, read_part(self._tensors, SCALES, (shape[0], 1)))

    @staticmethod
    def _floats(tensor: Tensor, scales: Tensor) -> Tensor:
        if tensor.dtype != torch.int8 or scales.shape != (len(tensor), 1):
            raise ConfigError(
                f"the checkpoint's {NAME} is {tensor.dtype} with scales {list(scales.shape)}; int8 with "
                f"{[len(tensor), 1]} is what its config says"
            )
        return tensor.to(torch.float32) * scales.to(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name != SCALES)

    def __len__(self) -> int:
        return len(self._tensors) - 1
