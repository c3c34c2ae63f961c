"""Work for an engine, and what transformers makes of it. Used by the parity tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from roost.config.options import EngineConfig
from roost.layers.attention import Attend, causal_attention
from roost.layers.convolution import convolution
from roost.layers.gated_delta import Recurrence, whole_sequences
from roost.layers.rotary import CosSin, rotate
from roost.models.decoder import Decoder
from roost.models.model import KvShape, PairHead
from tests.support.tiny_models import Served, greedy, prompts, tiny

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
CHUNKS = pytest.mark.parametrize("chunk", [5, 512])

Work = Sequence[tuple[tuple[int, ...], int]]  # prompts and how many tokens each shall get


def several(seed: int = 0) -> Work:
    """Requests of different lengths."""
    return list(zip(prompts(1, 33, 7, 18, 16, seed=seed), (25, 14, 30, 1, 17), strict=True))


def serve(model: Decoder, config: EngineConfig, work: Work) -> Served:
    """Run requests side by side."""
    served = Served(model, config)
    for number, (prompt, num_new) in enumerate(work):
        served.submit(f"r{number}", prompt, num_new)
    served.run()
    return served


def assert_equals_reference(served: Served, kind: str, work: Work) -> None:
    """Every output is what transformers generates."""
    for number, (prompt, num_new) in enumerate(work):
        assert served.output(f"r{number}") == greedy(kind, prompt, num_new), number
        assert served.finish(f"r{number}").reason == "length"


def dense(model: Decoder | PairHead) -> Attend:
    """Attention of one sequence from its start, without pages."""
    return Dense(model.kv)


@dataclass(frozen=True, slots=True)
class Dense:
    """One sequence from its start."""

    shapes: tuple[KvShape, ...]
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # keys and values by layer

    def __call__(
        self, layer: int, qk: Tensor, value: Tensor | None, cos_sin: CosSin, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention to all of it, or to its windows."""
        query, key = rotate(qk, cos_sin).tensor_split((qk.shape[1] - (0 if value is None else value.shape[1]),), dim=1)
        if value is not None:
            self.kept[layer] = key, value
        key, value = self.kept[layer]
        kv = self.shapes[layer]
        how = {"window": kv.window, "scale": kv.scale, "sinks": sinks}
        return causal_attention(query, key, value, start=0, first=0, **how)

    def recurrence(self, layer: int, inputs: Tensor) -> Recurrence:
        """Nothing has happened before it."""
        shape = self.shapes[layer].recurs
        assert shape is not None
        return whole_sequences(torch.tensor([len(inputs)], device=inputs.device), shape, inputs.dtype)

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor) -> Tensor:
        """Zeros lie before it."""
        before = [inputs.roll(back, dims=0) for back in range(weight.shape[1] - 1, 0, -1)]
        for back, each in zip(range(weight.shape[1] - 1, 0, -1), before, strict=True):
            each[:back] = 0
        return convolution(inputs, torch.stack(before, dim=1), weight)


def reference_logits(kind: str, prompt: tuple[int, ...]) -> Tensor:
    """Logits after every token, by transformers."""
    with torch.no_grad():
        return tiny(kind).reference(torch.tensor([prompt])).logits[0]


def logits_in_one_pass(model: Decoder, prompt: tuple[int, ...]) -> Tensor:
    """Logits after every token, by Roost without pages."""
    return model.logits(model.forward(torch.tensor(prompt), torch.arange(len(prompt)), dense(model)))
