"""The attention protocol: how a pass writes KV and reads it, whichever backend does it.

The forward passes and drafters say which segments of tokens there are; a backend plans what each reads, once for all
layers of a pass. Held by the forward passes, shared with their drafter.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from roost.attention.kv_cache import KvCache, LayerKv, PageTable
from roost.attention.recurrent_states import RecurrentStates
from roost.attention.registry import Backend
from roost.device.device import Device
from roost.layers.attention import Attend
from roost.layers.convolution import convolution, in_slots
from roost.layers.gated_delta import Recurrence
from roost.layers.rotary import CosSin
from roost.layers.segments import Segments
from roost.lazy_import import load_symbol
from roost.models.model import KvShape


class ReadKv(Protocol):
    """A planned read, for every layer of a book."""

    def __call__(self, query: Tensor, layer: LayerKv, sinks: Tensor | None = None) -> Tensor:
        """What the heads [num_tokens, num_heads, head_dim] of a layer read; sinks are as in `Attend`."""
        ...


class Attention(Protocol):
    """A backend; made by its factory from a device."""

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        """Plan what segments read in layers of a book whose KV has this shape, in a type that the backend declares."""
        ...

    def write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotate queries and keys, put keys and values into slots; the rotated queries.

        Quantised KV is what `layers.quantised_kv` makes of each slot's keys and values: reads of the same pass see it.
        """
        ...

    def rotate(self, query: Tensor, cos_sin: CosSin) -> Tensor:
        """Rotate queries [num_tokens, num_heads, head_dim], of a layer that writes no KV."""
        ...

    def copy(self, cache: KvCache, sources: Tensor, dests: Tensor) -> None:
        """Copy slots [num_groups, group_len], all layers, with their scales.

        Every source of a group is read before any is written.
        """
        ...

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Prepare on the host what a CUDA graph reads: before each replay of one, and before it is captured.

        `graph` tells graphs apart. The columns are those of the step's rows, chunks and rounds in the plan's order; all
        other rows of the graph are padding, and a graph of a step with chunks holds any rows and lengths that fit. The
        drafting of rounds beside chunks is a graph of its own, before that of the step: its rows are the rounds', and
        the lengths their widths. Start positions are given to a backend that needs lengths on the host, whose captured
        segments have none.
        """
        ...


def attend_through(
    attention: Attention,
    caches: Sequence[KvCache],
    slots: Sequence[Tensor],
    segments: Segments,
    layers: Sequence[tuple[int, int]],
    slots_before: Tensor | None = None,
    states: RecurrentStates | None = None,
) -> Attend:
    """A pass's way to KV: it writes to `slots` of each cache, and reads what `segments` say.

    `layers` gives for each layer that keeps KV its cache, and its number there; `slots_before` [num_tokens, n] where
    the inputs of short convolutions lie that come before each token, the nearest last; `states` are those of recurrent
    layers.
    """
    return _PagedPass(attention, caches, slots, segments, layers, slots_before, states)


class _PagedPass:
    """Attention, short convolutions and recurrences of one pass."""

    def __init__(
        self,
        attention: Attention,
        caches: Sequence[KvCache],
        slots: Sequence[Tensor],
        segments: Segments,
        layers: Sequence[tuple[int, int]],
        slots_before: Tensor | None,
        states: RecurrentStates | None,
    ) -> None:
        self._attention, self._caches, self._slots, self._layers = attention, caches, slots, layers
        self._before, self._states = slots_before, states
        if states is not None:
            number = next(number for number, cache in enumerate(caches) if cache.kv.recurs is not None)
            self._replay = states.replay(segments, slots[number])
        self._reads = [
            attention.read(cache.table, segments, cache.kv) if cache.kv.has_values else None for cache in caches
        ]

    def __call__(
        self, layer: int, qk: Tensor, value: Tensor | None, cos_sin: CosSin, sinks: Tensor | None = None
    ) -> Tensor:
        """What the heads of a layer read."""
        number, index = self._layers[layer]
        cache, read = self._caches[number], self._reads[number]
        assert read is not None, "a layer without keys and values does not attend"
        if value is None:
            query = self._attention.rotate(qk, cos_sin)
        else:
            query = self._attention.write(cache, index, self._slots[number], qk, value, cos_sin)
        return read(query, cache.layer(index), sinks)

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor) -> Tensor:
        """Keep a layer's inputs, and convolve them with those before."""
        number, index = self._layers[layer]
        assert self._before is not None, "nobody said where the inputs before a token lie"
        buffer = self._caches[number].keys[index].squeeze(1)
        buffer.index_copy_(0, self._slots[number], inputs)
        return convolution(inputs, in_slots(buffer, self._before), weight)

    def recurrence(self, layer: int, inputs: Tensor) -> Recurrence:
        """That of a layer, in this pass."""
        assert self._states is not None, "nobody said where the states of recurrent layers are"
        return self._states.recurrence(self._layers[layer][1], self._replay)


def make_attention(backend: Backend, device: Device) -> Attention:
    """A backend by its declaration."""
    attention: Attention = load_symbol(backend.factory)(device)
    return attention
