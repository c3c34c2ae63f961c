"""Attention of a step: how rows write their KV and read it, whichever backend does it.

The runner and drafters say what runs of tokens there are; a backend plans what each reads, once for all layers. Held
by the runner, shared with its drafter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from roost.attention.kv_cache import Pool, Table
from roost.attention.registry import Backend, load_symbol
from roost.attention.segments import Cut
from roost.device.device import Device
from roost.drafters.tree import Trees
from roost.layers.attention import Attend
from roost.layers.rotary import CosSin
from roost.models.model import KvShape
from roost.spec_shape import SpecShape

# (query, keys, values) of a layer -> what the heads [num_tokens, num_heads, head_dim] read
Read = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """The rows' tokens in a flat batch."""

    cut: Cut
    rows: Tensor  # [num_runs]
    starts: Tensor  # [num_runs] position of the first token
    rows_host: np.ndarray
    starts_host: np.ndarray | None  # for backends that need them
    trees: Trees | None  # of rounds that are no chains; `cut.tree_of` says which run has which


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branched:
    """Rounds whose K branches lie apart in their rows, at one draft step; the flat batch holds K tokens of each."""

    shape: SpecShape
    step: int
    rows: Tensor  # [R]
    lengths: Tensor  # [R] device lengths when the step starts
    rows_host: Sequence[int]
    starts_host: Sequence[int] | None


class Attention(Protocol):
    """A backend."""

    def read(self, table: Table, runs: Runs, kv: KvShape) -> Read:
        """Plan what runs of tokens read in layers of a book whose KV has this shape."""
        ...

    def read_branches(self, table: Table, branched: Branched, kv: KvShape) -> Read:
        """Plan what draft branches read."""
        ...

    def write(self, pool: Pool, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotate queries and keys, put keys and values into slots; the rotated queries."""
        ...

    def copy(self, pool: Pool, sources: Tensor, dests: Tensor) -> None:
        """Copy slots [num_groups, group_len], all layers; every source of a group is read before any is written."""
        ...

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Prepare on the host what a CUDA graph reads: before each replay, and before it is captured.

        `graph` tells graphs apart. The columns are those of the step's rows, all other rows of the graph are padding;
        start positions are given to a backend that needs lengths on the host.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """The layers of one pool in one pass."""

    pool: Pool
    slots: Tensor  # [num_tokens] where the pass writes
    read: Read


def attend_through(attention: Attention, lanes: Sequence[Lane], places: Sequence[tuple[int, int]]) -> Attend:
    """The way to KV of a pass; `places` gives each layer's lane, and its number there."""

    def attend(layer: int, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        number, index = places[layer]
        lane = lanes[number]
        query = attention.write(lane.pool, index, lane.slots, qk, value, cos_sin)
        return lane.read(query, lane.pool.keys[index], lane.pool.values[index])

    return attend


def make_attention(backend: Backend, device: Device) -> Attention:
    """A backend by its declaration."""
    attention: Attention = load_symbol(backend.factory)(device)
    return attention
