"""Graph sizes: which batch sizes of rounds and sizes of prefill chunks get a CUDA graph; integers only, no torch.

A step runs on the smallest graph that holds it and is padded to its size. Costs of drafts are learned for the same
batch sizes. Read by the scheduler's draft policy and by the device side.
"""

from dataclasses import dataclass

from roost.spec_widths import Widths

_TOKENS_PER_CHUNK = 8  # of a full graph of chunks, on average at least


def graph_sizes(widths: Widths, rounds_max: int) -> list[tuple[int, int]]:
    """(batch size, width) of the CUDA graphs of rounds, largest first; one serves all batches down to the next."""
    sizes = batch_sizes(rounds_max)
    found = []
    for before, size in reversed(list(zip([0, *sizes], sizes, strict=False))):
        served = {width for number in range(before + 1, size + 1) for width in widths.of(number)}
        found += [(size, width) for width in sorted(served, reverse=True)]
    return found


def batch_sizes(most: int) -> list[int]:
    """Batch sizes of CUDA graphs, and of learned costs: close together where one more row costs much."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 32), *range(256, most + 1, 128)]
    return [size for size in sizes if size < most] + [most]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """How many chunks, and tokens of theirs, a graph holds beside a chunk of the padding row."""

    chunks: int
    tokens: int
    tile_len: int  # tokens of a tile of attention

    def holds(self, num_chunks: int, num_tokens: int) -> bool:
        """Whether so many chunks with so many tokens in all fit."""
        return num_chunks <= self.chunks and num_tokens <= self.tokens

    @property
    def num_rows(self) -> int:
        """Rows of the batch, the padding row included."""
        return self.chunks + 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch: the last row, which is the padding row, has one at least."""
        return self.tokens + 1

    @property
    def num_tiles(self) -> int:
        """Tiles of attention, at most: each row can end in the middle of one."""
        return self.num_tokens // self.tile_len + self.num_rows


def chunk_sizes(chunk: int, rows_max: int, row_width: int, tile_len: int) -> list[ChunkSize]:
    """Sizes for steps of at most `chunk` tokens, the smallest first.

    A step is padded to the next size, which costs time: from the third on, each size is at most about half as large
    again as the one before. The padding is one row's, so a size is less than a row is wide. With the padding row's
    token, all sizes but the last are whole tiles.
    """
    grid = [tile_len * (2 + part) << power for power in range(chunk.bit_length()) for part in (0, 1)]
    tokens = [each - 1 for each in (tile_len, *grid) if each < chunk] + [chunk]
    return [
        ChunkSize(chunks=min(rows_max, -(-each // _TOKENS_PER_CHUNK)), tokens=each, tile_len=tile_len)
        for each in tokens
        if each < row_width
    ]
