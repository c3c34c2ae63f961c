"""Graph sizes: which batch sizes of rounds, and which steps with prefill chunks, get a CUDA graph; no torch.

A step runs on the smallest graph that holds it and is padded to its size. Costs of drafts are learned for the same
batch sizes. Integers only. Read by the scheduler and by the device side.
"""

from bisect import bisect_right
from collections.abc import Sequence

from roost.spec_widths import Widths

_CAPTURED_MAX = 4096  # tokens of the largest graph of a step with chunks


def graph_sizes(widths: Widths, rounds_max: int) -> list[tuple[int, int]]:
    """(batch size, width) of the CUDA graphs of rounds, largest first; one serves all batches down to the next."""
    sizes = batch_sizes(rounds_max)
    found = []
    for before, size in reversed(list(zip([0, *sizes], sizes, strict=False))):
        served = {
            width for number in range(before + 1, size + 1) for width in widths.of(number) + widths.wide_of(number)
        }
        found += [(size, width) for width in sorted(served, reverse=True)]
    return found


def batch_sizes(most: int) -> list[int]:
    """Batch sizes of CUDA graphs, and of learned costs: close together where one more row costs much."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 32), *range(256, most + 1, 128)]
    return [size for size in sizes if size < most] + [most]


def step_tokens_max(chunk: int, widths: Widths, rounds_max: int) -> int:
    """Tokens that a step of chunks and rounds has at most: `chunk` of prompts, and every node of every round."""
    return chunk + widths.num_nodes_max(rounds_max)


def fill_size(sizes: Sequence[int], num_tokens: int, least: int, most: int) -> int:
    """How many prompt tokens, from `least` to `most`, to add to the `num_tokens` others of a step.

    As many as make it a captured size, so that no padding is computed; `most` if there is no such size.
    """
    place = bisect_right(sizes, num_tokens + most) - 1
    return sizes[place] - num_tokens if place >= 0 and sizes[place] >= num_tokens + least else most


def mixed_sizes(tokens_max: int) -> list[int]:
    """Tokens of the CUDA graphs of steps with prefill chunks, the smallest first, for steps of at most `tokens_max`.

    A step is padded to the next size. Up to 128 tokens it takes as long as reading the weights does, so that few sizes
    are enough; from there on each token costs, and eight sizes an octave pad by an eighth at most, 6% on average, in
    whole tiles of 16 tokens. Beyond `_CAPTURED_MAX` the device needs so long for a step that the host keeps ahead of it
    operation by operation.
    """
    grid = [128 + 16 * part << power for power in range(_CAPTURED_MAX.bit_length()) for part in range(8)]
    most = min(tokens_max, _CAPTURED_MAX)
    return [size for size in (16, 32, 48, 64, 96, *grid) if size < most] + [most]
