"""A token's keys are summed in one order: its result is bit for bit the same in whatever pass it runs."""

from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor

from roost.layers.attention import paged_attention, plan_reads
from roost.layers.batch_invariance import KEY_BLOCK, AttentionPadding, attention_padding, row_multiple
from roost.layers.linear import make_linear
from roost.layers.segments import Segments
from tests.support.segments import make_segments

NUM_HEADS, NUM_KV_HEADS, PAGE_SIZE = 9, 3, 16
LENGTH = 1100  # past two blocks of keys
SCALE = 0.2


class Text:
    """One sequence, whose KV lies in slots of a row, and attention over any part of it."""

    def __init__(self, head_dim: int, window: int | None) -> None:
        generator = torch.Generator().manual_seed(head_dim)
        self.head_dim, self.window = head_dim, window
        self.query = torch.randn((LENGTH, NUM_HEADS, head_dim), generator=generator)
        self.key, self.value = torch.randn((2, LENGTH, NUM_KV_HEADS, head_dim), generator=generator)
        self.table = (torch.randperm(80, generator=generator) + 1).to(torch.int32)[None]  # more pages than the text has

    def read(self, segments: Segments, query: Tensor, places: Tensor | None = None) -> Tensor:
        """What queries read; `places` [LENGTH]: where in the row each position lies, itself unless told."""
        at = torch.arange(LENGTH) if places is None else places
        slots = self.table[0, at // PAGE_SIZE].to(torch.int64) * PAGE_SIZE + at % PAGE_SIZE
        keys, values = torch.full((2, 81 * PAGE_SIZE, NUM_KV_HEADS, self.head_dim), torch.nan)
        keys[slots], values[slots] = self.key, self.value
        reads = plan_reads(self.table, segments, page_size=PAGE_SIZE, window=self.window, head_dim=self.head_dim)
        return paged_attention(query, keys, values, reads, scale=SCALE)

    def alone(self, position: int) -> Tensor:
        """A token by itself, as plain decoding runs it."""
        return self.read(make_segments([0], [position]), self.query[position : position + 1])


@pytest.fixture(params=[(64, None), (64, 300), (16, None), (8, 700)], ids=str)
def text(request: pytest.FixtureRequest) -> Text:
    return Text(*request.param)


PLACES = (
    0,
    1,
    62,
    63,
    64,
    130,
    191,
    192,
    193,
    255,
    256,
    300,
    383,
    384,
    400,
    511,
    512,
    513,
    700,
    703,
    768,
    900,
    1023,
    1024,
)


def test_this_machine_has_shapes_that_agree() -> None:
    for head_dim in (64, 128, 16):
        assert attention_padding(head_dim).is_exact
    assert row_multiple(torch.get_num_threads()) is not None


def test_keys_are_padded_to_the_next_shape_that_agrees_and_no_further() -> None:
    padding = AttentionPadding(rows=4, tails=(64, 192, 512), is_exact=True)
    asked = {1: 64, 64: 64, 65: 192, 192: 192, 193: 512, 512: 512, 513: 576, 1024: 1024, 1025: 1088, 1300: 1536}
    assert {num_keys: padding.keys_for(num_keys) for num_keys in asked} == asked


def test_a_token_in_a_chunk_of_any_cut_is_the_token_alone(text: Text) -> None:
    random = Random(0)
    for first, last in [(0, LENGTH), (0, 5), (3, 10), (100, 612), (509, 516), *_cuts(random)]:
        segments = make_segments([0], [first], [last - first], are_rounds=False)
        chunk = text.read(segments, text.query[first:last])
        for position in sorted({first, last - 1, *(place for place in PLACES if first <= place < last)}):
            assert torch.equal(chunk[position - first], text.alone(position)[0]), (first, last, position)


def _cuts(random: Random) -> list[tuple[int, int]]:
    return [(first, min(LENGTH, first + random.randint(2, 300))) for first in random.sample(range(LENGTH - 2), 6)]


@pytest.mark.parametrize("width", [2, 3, 5, 7])
def test_a_token_in_a_chain_is_the_token_alone(text: Text, width: int) -> None:
    for start in PLACES:
        chain = text.read(make_segments([0], [start], [width]), text.query[start : start + width])
        for node in range(width):
            assert torch.equal(chain[node], text.alone(start + node)[0]), (start, node)


def test_a_node_on_any_path_of_a_tree_is_the_token_alone(text: Text) -> None:
    random, width = Random(1), 16
    for start in PLACES:
        path = [0, *sorted(random.sample(range(1, width), 4))]  # nodes from the root on; the others hang somewhere
        parents = [
            random.choice([each for each in range(node) if each not in path[1:]] or [0]) for node in range(width)
        ]
        for above, below in pairwise(path):
            parents[below] = above
        sees = torch.eye(width, dtype=torch.bool)
        for node in range(1, width):
            sees[node] |= sees[parents[node]]
        places = torch.arange(LENGTH)
        places[start : start + len(path)] = start + torch.tensor(path)
        places[start + len(path) :] += width - len(path)
        query = torch.zeros(width, NUM_HEADS, text.head_dim)
        query[path] = text.query[start : start + len(path)]
        nodes = _tree_nodes(text, start, sees, query, places)
        for depth, node in enumerate(path):
            assert torch.equal(nodes[node], text.alone(start + depth)[0]), (start, node)


def _tree_nodes(text: Text, start: int, mask: Tensor, query: Tensor, places: Tensor) -> Tensor:
    """What the nodes read; those beside the path hold nothing, so that a path which reads one of them is no number."""
    depths = mask.sum(dim=1) - 1
    segments = make_segments([0], [start], [len(mask)], trees=(depths[None], mask[None]))
    return text.read(segments, query, places)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_projection_in_fp32_gives_a_token_the_same_bits_beside_any_number_of_others(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        _check_projection()
    finally:
        torch.set_num_threads(before)


def _check_projection() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn((700, 576), generator=generator), torch.randn((192, 576), generator=generator)
    project = make_linear(weight, None, "fp32")
    many = project(hidden)
    for number in (*range(1, 40), 63, 65, 127, 255, 511, 513):
        assert torch.equal(project(hidden[7 : 7 + number]), many[7 : 7 + number]), number


def test_blocks_of_keys_begin_at_the_same_positions_for_everybody() -> None:
    """With a window, what a token reads first is its own; where its blocks begin is not."""
    text = Text(64, window=KEY_BLOCK + 88)
    chunk = text.read(make_segments([0], [900], [200], are_rounds=False), text.query[900:1100])
    assert torch.equal(chunk[199], text.alone(1099)[0])
