"""Projections of few tokens on a GPU: `python -m bench.gpu_linear [--tokens 1 8 64] [--shapes 8b 135m]`.

For each projection of a layer and each number of tokens: microseconds of our kernel (with its norm, gate or sum) and of
cuBLAS (the product alone), in graphs of launches over copies of the weights that no cache holds. Then a stack of layers
without attention, fused and composed: whether replays give the bits of launches that wait for each other, how far both
are apart, microseconds a layer. Without a GPU it runs a tiny shape in Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import linear

import roost.kernels.ops as fused
from roost.layers.linear import PlainLinear
from roost.layers.ops import Ops, Residual

DEVICE = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
EPS = 1e-5
COPIED_BYTES = 3e8  # of copies of a weight: several times the largest cache
NUM_REPLAYS = 20
REPEATS = 5  # to take the median of


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of a model, and its head."""

    num_layers: int
    hidden: int
    wide: int
    qkv: int
    vocab: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each."""
        return {
            "qkv": (self.qkv, self.hidden),
            "out": (self.hidden, self.hidden),
            "gate_up": (2 * self.wide, self.hidden),
            "down": (self.hidden, self.wide),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {
    "8b": Shape(32, 4096, 14336, 6144, 128256),
    "135m": Shape(30, 576, 1536, 960, 49152),
    "tiny": Shape(2, 32, 48, 64, 80),
}


def num_copies(out_len: int, in_len: int) -> int:
    """Of a weight, for no cache to hold all of them."""
    return 1 if DEVICE.type == "cpu" else max(2, min(128, int(COPIED_BYTES / (2 * out_len * in_len))))


class Weights:
    """Random projections of a model, several copies of each."""

    def __init__(self, shape: Shape) -> None:
        self.norm = torch.rand(shape.hidden, device=DEVICE) + 0.5
        self._copies = {
            name: [self._random(*size) for _ in range(num_copies(*size))] for name, size in shape.projections.items()
        }

    def of(self, name: str, number: int) -> PlainLinear:
        """The projection of a layer."""
        return self._copies[name][number % len(self._copies[name])]

    def num_of(self, name: str) -> int:
        """How many launches see as many weights."""
        return len(self._copies[name]) * (1 if DEVICE.type == "cpu" else 8)

    @staticmethod
    def _random(out_len: int, in_len: int) -> PlainLinear:
        return PlainLinear(torch.randn((out_len, in_len), device=DEVICE, dtype=torch.bfloat16) * in_len**-0.5, None)


def replay_of(work: Callable[[], object]) -> Callable[[], object]:
    """A graph of some work; without a GPU the work itself."""
    work()
    if DEVICE.type == "cpu":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def microseconds(replay: Callable[[], object]) -> float:
    """The median of several replays."""
    times = []
    for _ in range(REPEATS):
        wait()
        began = time.perf_counter()
        replay()
        wait()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def wait() -> None:
    """Until the device is done."""
    torch.cuda.synchronize() if DEVICE.type == "cuda" else None


def one(name: str, ops: Ops, weights: Weights, x: Tensor, hidden: Tensor, number: int) -> Tensor:
    """A projection with what stands around it."""
    project, stream = weights.of(name, number), Residual(x)
    if name == "qkv":
        return ops.norm_linear(stream, weights.norm, EPS, project)[1]
    if name == "gate_up":
        return ops.norm_gate_up(stream, weights.norm, EPS, project, "silu")[1]
    if name == "head":
        return ops.linear(x, project)
    return ops.linear_add(x, project, hidden, None).total()


def stack(ops: Ops, weights: Weights, shape: Shape, hidden: Tensor, after_each: Callable[[], None]) -> Tensor:
    """The layers of a model, their attention left out."""
    stream = Residual(hidden)
    for number in range(shape.num_layers):
        total, heads = ops.norm_linear(stream, weights.norm, EPS, weights.of("qkv", number))
        after_each()
        stream = ops.linear_add(heads[:, : shape.hidden], weights.of("out", number), total, weights.norm)
        after_each()
        total, gated = ops.norm_gate_up(stream, weights.norm, EPS, weights.of("gate_up", number), "silu")
        after_each()
        stream = ops.linear_add(gated, weights.of("down", number), total, weights.norm)
        after_each()
    return stream.total()


def measure(shape_name: str, num_tokens: int, weights: Weights) -> None:
    """Print a shape's projections and its stack."""
    shape, ops = SHAPES[shape_name], fused.TRITON_OPS
    for name, (out_len, in_len) in shape.projections.items():
        x = torch.randn((num_tokens, in_len), device=DEVICE, dtype=torch.bfloat16)
        hidden = torch.randn((num_tokens, out_len), device=DEVICE, dtype=torch.bfloat16)
        count = weights.num_of(name)

        def ours(x: Tensor = x, hidden: Tensor = hidden, name: str = name, count: int = count) -> None:
            for number in range(count):
                one(name, ops, weights, x, hidden, number)

        def cublas(x: Tensor = x, name: str = name, count: int = count) -> None:
            for number in range(count):
                linear(x, weights.of(name, number).weight)

        mine, theirs = (microseconds(replay_of(work)) / count for work in (ours, cublas))
        print(
            f"{shape_name} {name} [{out_len}, {in_len}] of {num_tokens}: {mine:.2f} us, "
            f"{2 * out_len * in_len / mine / 1e6:.2f} TB/s; cuBLAS, the product alone, {theirs:.2f} us",
            flush=True,
        )
    hidden = torch.randn((num_tokens, shape.hidden), device=DEVICE, dtype=torch.bfloat16)
    apart = stack(ops, weights, shape, hidden, wait)
    results: list[Tensor] = []
    replay = replay_of(lambda: results.append(stack(ops, weights, shape, hidden, lambda: None)))
    is_same = True
    for _ in range(NUM_REPLAYS):
        replay()
        wait()
        is_same &= torch.equal(results[-1], apart)
    mine = microseconds(replay) / shape.num_layers
    with patch.object(fused, "linear_tiling", lambda *_, **__: None):
        composed = stack(ops, weights, shape, hidden, lambda: None)
        theirs = microseconds(replay_of(lambda: stack(ops, weights, shape, hidden, lambda: None))) / shape.num_layers
    off = float((apart - composed).norm() / composed.norm())
    print(
        f"{shape_name} layers of {num_tokens}: {mine:.2f} us, composed {theirs:.2f} us; "
        f"replays {'equal' if is_same else 'DIFFER FROM'} launches apart; off by {off:.4f}",
        flush=True,
    )


def main() -> int:
    """All shapes and numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny"] if DEVICE.type == "cpu" else None)
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in args.shapes or ["135m", "8b"]:
        weights = Weights(SHAPES[name])
        for num_tokens in args.tokens:
            measure(name, num_tokens, weights)
        del weights
    return 0


if __name__ == "__main__":
    sys.exit(main())
