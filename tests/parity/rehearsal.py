"""A device that captures on a CPU, and attention over spans in plain torch: what a GPU does, without one.

A captured step is a tape of operations whose results stay in the memory they were first written to, as in a graph of
CUDA; whatever would make the host wait for the device raises. Used by the tests of captured steps.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import roost.forward.passes
import roost.runner.executor
import tests.parity.tiny
from roost.attention.kv_cache import Table
from roost.attention.protocol import Read
from roost.attention.registry import TRITON
from roost.attention.torch_backend import TorchAttention
from roost.device.cpu import CpuDevice
from roost.device.device import Replay
from roost.layers.spans import Masks, Shifts, Spans, span_attention

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

    def capture(self, work: Callable[[], None]) -> Replay | None:
        """Run once, then once more onto a tape."""
        work()
        tape = Tape()
        with tape:
            work()
        return tape.replay


@torch.library.custom_op("roost_tests::spans", mutates_args=())
def _spans(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    columns: list[Tensor],
    masks: list[Tensor],
    shifts: list[Tensor],
    page_size: int,
    window: int,
    scale: float,
) -> Tensor:
    rows, offsets, widths, starts, tile_spans, tile_firsts = columns
    spans = Spans(
        rows=rows,
        offsets=offsets,
        widths=widths,
        starts=starts,
        tile_spans=tile_spans,
        tile_firsts=tile_firsts,
        tile_len=1,
        masks=Masks(of_span=masks[0], depths=masks[1], sees=masks[2]) if masks else None,
        shifts=Shifts(bases=shifts[0], shifts=shifts[1]) if shifts else None,
    )
    return span_attention(
        query, keys, values, table, spans, page_size=page_size, window=window or None, scale=scale
    ).clone()


def rehearsed(monkeypatch: pytest.MonkeyPatch, *, graphs: bool) -> None:
    """Have engines of the tests run as on a GPU: lengths on the device alone, steps captured."""
    triton_attention = pytest.importorskip("roost.attention.triton_backend", exc_type=ImportError)
    if tests.parity.tiny.DEVICE.type != "cpu":
        pytest.skip("a rehearsal is a CPU's; here steps are captured for real")

    class SpanAttention(TorchAttention, triton_attention.TritonAttention):  # type: ignore[misc, name-defined]
        """Spans as the kernels get them, read by their reference; what is written and copied, in torch."""

        read = triton_attention.TritonAttention.read
        read_branches = triton_attention.TritonAttention.read_branches

        def _reading(self, table: Table, spans: Spans, scale: float) -> Read:
            columns = [spans.rows, spans.offsets, spans.widths, spans.starts, spans.tile_spans, spans.tile_firsts]
            masks = [] if spans.masks is None else [spans.masks.of_span, spans.masks.depths, spans.masks.sees]
            shifts = [] if spans.shifts is None else [spans.shifts.bases, spans.shifts.shifts]
            how = (table.page_size, table.window or 0, scale)
            return lambda query, keys, values: _spans(query, keys, values, table.pages, columns, masks, shifts, *how)

    monkeypatch.setattr(roost.runner.executor, "open_device", lambda device: RehearsalDevice())
    monkeypatch.setattr(roost.forward.passes, "make_attention", lambda backend, device: SpanAttention(device))
    monkeypatch.setattr(tests.parity.tiny, "BACKEND", TRITON)
    monkeypatch.setattr(tests.parity.tiny, "GRAPHS", graphs)
