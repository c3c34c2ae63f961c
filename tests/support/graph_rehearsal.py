"""A device that captures on a CPU, and a backend that reads segments in plain torch: what a GPU does, without one.

A graph is a tape of operations whose results stay in the memory they were first written to, as in a CUDA graph;
whatever would make the host wait for the device raises. Used by the tests of graphs and of backends.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import roost.runner.executor
import tests.support.tiny_models
from roost.attention.kv_cache import LayerKv, PageTable
from roost.attention.protocol import ReadKv
from roost.attention.registry import TRITON, Backend
from roost.attention.torch_backend import TorchAttention
from roost.device.cpu import CpuDevice
from roost.device.device import Replay as ReplayGraph
from roost.layers.gated_delta import DeltaShape, DeltaWeights, Recurrence, Replay, gated_delta
from roost.layers.ops import TORCH_OPS
from roost.layers.quantised_kv import dequantise
from roost.layers.rounds import Pages
from roost.layers.segments import Segments, segment_attention
from roost.models.model import KvShape

_WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::nonzero")


class Tape(TorchDispatchMode):
    """Operations in the order they ran."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one, and keep it."""
        assert func._schema.name not in _WAITS, f"{func} would wait for the device"
        result = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, tree_leaves(result)))
        return result

    def replay(self) -> None:
        """Run all again, into the same memory."""
        with torch.inference_mode():
            for func, args, kwargs, kept in self._calls:
                for old, new in zip(kept, tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and _memory(old) != _memory(new):  # no view, and not written in place
                        old.copy_(new)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RehearsalDevice(CpuDevice):
    """A CPU with graphs."""

    def capture(self, work: Callable[[], None]) -> ReplayGraph | None:
        """Run once, then once more onto a tape."""
        work()
        tape = Tape()
        with tape:
            work()
        return tape.replay


_COLUMNS = ("rows", "start_positions", "offsets", "query_lens", "tile_segments", "tile_offsets")
_TREES = ("tree_of", "tree_depths", "tree_mask")
_BRANCHES = ("branch_bases", "branch_shifts")


@torch.library.custom_op("roost_tests::segments", mutates_args=())
def _read_segments(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    columns: list[Tensor],
    trees: list[Tensor],
    branches: list[Tensor],
    page_size: int,
    window: int,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """The reference as one operation, so that a tape does not see what it asks of its tensors."""
    given = {
        **dict(zip(_COLUMNS, columns, strict=True)),
        **dict(zip(_TREES, trees, strict=False)),
        **dict(zip(_BRANCHES, branches, strict=False)),
    }
    segments = Segments(**given, tile_len=1)
    how = {"page_size": page_size, "window": window or None, "scale": scale, "sinks": sinks}
    return segment_attention(query, keys, values, table, segments, **how).clone()


def read_segments(table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
    """What segments read, by lengths that the device alone knows."""
    columns, trees, branches = (
        [column for name in names if (column := getattr(segments, name)) is not None]
        for names in (_COLUMNS, _TREES, _BRANCHES)
    )
    how = (columns, trees, branches, table.page_size, table.window or 0, kv.scale)

    def read(query: Tensor, layer: LayerKv, sinks: Tensor | None = None) -> Tensor:
        keys, values, scales = layer
        if scales is not None:
            keys, values = (
                dequantise(codes, scales[:, number].t(), query.dtype) for number, codes in enumerate((keys, values))
            )
        return _read_segments(query, keys, values, table.pages, *how, sinks)

    return read


@torch.library.custom_op("roost_tests::gated_delta", mutates_args=("memory",))
def _run_delta(
    inputs: Tensor,
    learned: list[Tensor],
    memory: list[Tensor],
    columns: list[Tensor],
    trees: list[Tensor],
    replay: list[Tensor],
    page_size: int,
    replayed_max: int,
    sizes: list[int],
) -> Tensor:
    """The recurrence as one operation."""
    num_key_heads, num_value_heads, key_dim, value_dim, conv_len = sizes
    shape = DeltaShape(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv_len=conv_len,
    )
    given = {**dict(zip(_COLUMNS, columns, strict=True)), **dict(zip(_TREES, trees, strict=False))}
    slots, table, sources, starts, kept_at, kept_in = replay
    at = Recurrence(
        replay=Replay(
            segments=Segments(**given, tile_len=1),
            slots=slots,
            pages=Pages(table=table, size=page_size),
            sources=sources,
            starts=starts,
            replayed_max=replayed_max,
            kept_at=kept_at,
            kept_in=kept_in,
        ),
        **dict(zip(("inputs", "states", "tails"), memory, strict=True)),
    )
    conv, decay, forget_bias = learned
    return gated_delta(inputs, DeltaWeights(shape=shape, conv=conv, decay=decay, forget_bias=forget_bias), at)


def run_delta(inputs: Tensor, weights: DeltaWeights, at: Recurrence) -> Tensor:
    """What heads say, of rows whose lengths and states the device alone knows."""
    columns, trees = (
        [column for name in names if (column := getattr(at.replay.segments, name)) is not None]
        for names in (_COLUMNS, _TREES)
    )
    replay, shape = at.replay, weights.shape
    return _run_delta(
        inputs,
        [weights.conv, weights.decay, weights.forget_bias],
        [at.inputs, at.states, at.tails],
        columns,
        trees,
        [replay.slots, replay.pages.table, replay.sources, replay.starts, replay.kept_at, replay.kept_in],
        replay.pages.size,
        replay.replayed_max,
        [shape.num_key_heads, shape.num_value_heads, shape.key_dim, shape.value_dim, shape.conv_len],
    )


REHEARSED_OPS = replace(TORCH_OPS, gated_delta=run_delta)


class RehearsedAttention(TorchAttention):
    """Segments as kernels get them, read by their reference; what is written and copied, in torch."""

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        """Nothing is planned on the host."""
        assert segments.host is None
        return read_segments(table, segments, kv)


REHEARSED = replace(
    TRITON,
    name="rehearsed",
    factory="tests.support.graph_rehearsal:RehearsedAttention",
    ops="tests.support.graph_rehearsal:REHEARSED_OPS",
    devices=("cpu",),
    default_for=(),
    package=None,
)


def rehearsed(monkeypatch: pytest.MonkeyPatch, *, graphs: bool, backend: Backend = REHEARSED) -> None:
    """Have engines of the tests run as on a GPU: lengths on the device alone, steps captured."""
    if tests.support.tiny_models.DEVICE.type != "cpu":
        pytest.skip("a rehearsal is a CPU's; here steps are captured for real")
    monkeypatch.setattr(roost.runner.executor, "open_device", lambda device: RehearsalDevice())
    monkeypatch.setattr(tests.support.tiny_models, "BACKEND", backend)
    monkeypatch.setattr(tests.support.tiny_models, "GRAPHS", graphs)
