"""Attention of the Numba backend by type of KV: `python -m bench.cpu_attention`. Milliseconds of a decoding step.

Rows decode one token each behind so many tokens of context, over pages of 16 in random order; as many layers as the
model has take turns, so that keys and values come from memory as they do in a step. Types take turns, round by round,
and a line has the medians: milliseconds of a step's attention in all layers, and the ratio to fp32 within rounds.
"""

import argparse
import time
from statistics import median
from types import SimpleNamespace

import torch

from roost.attention.kv_cache import LayerKv
from roost.attention.numba_backend import NumbaAttention
from roost.device.open import open_device
from roost.layers.quantised_kv import CODE_MAX, SCALE_DTYPE
from roost.layers.segments import Segments
from roost.models.model import KEPT_DTYPES, KvShape

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 30, 9, 3, 64, 16  # the default model, the default pages
KV_TYPES = ("fp32", "fp16", "int8")
HEADS = ("rows", "context", *(f"{name}, ms" for name in KV_TYPES), *(f"{name} / fp32" for name in KV_TYPES[1:]))


class Decoding:
    """Rows that decode behind a context, with KV of one type."""

    def __init__(self, attention: NumbaAttention, name: str, num_rows: int, context: int) -> None:
        generator, pages_per_row = torch.Generator().manual_seed(0), -(-(context + 1) // PAGE_SIZE)
        num_pages = num_rows * pages_per_row
        table = torch.randperm(num_pages, generator=generator).to(torch.int32).view(num_rows, pages_per_row)
        dtype, shape = KEPT_DTYPES[name], (num_pages * PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self._query = torch.randn((num_rows, NUM_HEADS, HEAD_DIM), generator=generator)
        self._layers = [self._layer(dtype, shape, generator) for _ in range(NUM_LAYERS)]
        number = torch.arange(num_rows, dtype=torch.int32)
        segments = Segments(
            rows=number.to(torch.int64),
            start_positions=torch.full((num_rows,), context),
            offsets=number,
            query_lens=torch.ones_like(number),
            tile_segments=number,
            tile_offsets=torch.zeros_like(number),
            tile_len=1,
        )
        kv = KvShape(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, scale=HEAD_DIM**-0.5, dtype=dtype)
        pages = SimpleNamespace(pages=table, page_size=PAGE_SIZE, window=None)
        self._read = attention.read(pages, segments, kv)

    @staticmethod
    def _layer(dtype: torch.dtype, shape: tuple[int, int, int], generator: torch.Generator) -> LayerKv:
        most = CODE_MAX.get(dtype, 1.0)
        keys, values = ((torch.rand(shape, generator=generator) * 2 - 1).mul_(most).to(dtype) for _ in range(2))
        scales = torch.full((shape[1], 2, shape[0]), 1 / most, dtype=SCALE_DTYPE) if dtype in CODE_MAX else None
        return LayerKv(keys, values, scales)

    def step(self) -> float:
        """Milliseconds of all layers."""
        began = time.perf_counter()
        for layer in self._layers:
            self._read(self._query, layer)
        return 1000 * (time.perf_counter() - began)


def main() -> None:
    """Print a line for each number of rows and each context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8", help="rows that decode at once")
    parser.add_argument("--contexts", default="500,2000,8000", help="tokens before the one that each decodes")
    parser.add_argument("--rounds", type=int, default=15, help="times that each type is measured, by turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the team")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    attention = NumbaAttention(open_device(torch.device("cpu")))
    print("| " + " | ".join(HEADS) + " |\n" + "|---" * len(HEADS) + "|", flush=True)
    for num_rows in map(int, args.rows.split(",")):
        for context in map(int, args.contexts.split(",")):
            runs = [Decoding(attention, name, num_rows, context) for name in KV_TYPES]
            for run in runs:
                run.step()
            rounds = [[run.step() for run in runs] for _ in range(args.rounds)]
            times = [f"{median(column):.2f}" for column in zip(*rounds, strict=True)]
            ratios = [f"{median(each[n] / each[0] for each in rounds):.2f}" for n in range(1, len(KV_TYPES))]
            print(f"| {num_rows} | {context} | " + " | ".join(times + ratios) + " |", flush=True)


if __name__ == "__main__":
    main()
