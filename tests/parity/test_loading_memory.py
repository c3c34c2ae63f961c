"""A checkpoint loads within the memory that its model keeps and one tensor more: what was read is let go at once."""

import gc
import weakref
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from roost.layers.ops import TORCH_OPS
from roost.models.decoder import Decoder
from tests.support.tiny_models import tiny


class Lazy(Mapping[str, Tensor]):
    """Tensors that are read when they are looked up, none while another one is still there."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self._read: list[tuple[str, weakref.ref[Tensor]]] = []
        self.num_read = 0

    def __getitem__(self, name: str) -> Tensor:
        left = [name for name, read in self._read if read() is not None]
        assert left == [], f"{name} is read while {left} are still there"
        tensor = self._state[name].clone()
        self._read = [(name, weakref.ref(tensor))]
        self.num_read += 1
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "qwen3.5", "qwen3.5-moe", "lfm2", "gemma4", "gemma4-moe"])
def test_one_tensor_is_there_besides_what_is_kept(kind: str, weights: str) -> None:
    state = Lazy(tiny(kind).reference.state_dict())
    gc.disable()  # what is let go is gone without it
    try:
        Decoder(tiny(kind).config, state, weights, torch.device("cpu"), TORCH_OPS)
    finally:
        gc.enable()
    tied = len([name for name in state if name == "lm_head.weight"]) if tiny(kind).config.tied else 0
    assert state.num_read == len(state) - tied
