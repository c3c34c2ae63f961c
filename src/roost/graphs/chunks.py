"""Chunk graphs: prefill chunks that were captured once, at a few sizes, and are replayed.

Where everything lies is data here: a step is laid out on the host as ever, padded with chunks of the sink's to the size
that was captured, and put into the captured layout's memory in one transfer. A chunk that is not final samples nothing:
the sink does in its place. Owns the captured tensors. Called by the runner.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.forward.layout import Batch, Columns, Layout, chunk_columns
from roost.forward.passes import Inputs, Passes
from roost.forward.sizes import ChunkSize, chunk_sizes
from roost.graphs.capture import Captured, capture
from roost.step import StepPlan

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedChunks:
    """One size."""

    size: ChunkSize
    memory: Tensor  # all columns of the layout, one after the other
    step: Captured


class ChunkGraphs:
    """Captured chunks, by size."""

    def __init__(self, passes: Passes, resolved: Resolved, device: Device) -> None:
        self._passes, self._device, self._shape = passes, device, resolved.spec
        self._needs_host_lengths = resolved.backend.needs_host_lengths
        sched, tile_len = resolved.sched, resolved.backend.tile_len_max
        sizes = chunk_sizes(sched.chunk, sched.max_running, resolved.row_width, tile_len)
        made = [self._capture(size) for size in reversed(sizes)]  # the largest needs most room
        self._captured = [each for each in reversed(made) if each is not None]

    def find(self, num_rows: int, num_tokens: int) -> CapturedChunks | None:
        """The smallest that holds so many chunks of so many tokens in all."""
        return next((each for each in self._captured if each.size.holds(num_rows, num_tokens)), None)

    def load(self, chunks: CapturedChunks, plan: StepPlan, batch: Batch) -> Captured:
        """Put the chunks of a step in place; the rest is the sink's."""
        columns = chunk_columns(plan, batch, pairs=self._passes.drafter is not None)
        layout = self._padded(chunks.size, batch.widths, plan.is_final, columns, plan.rows)
        chunks.memory.copy_(self._device.send({"packed": layout.packed})["packed"])
        return chunks.step

    def _padded(
        self, size: ChunkSize, widths: np.ndarray, is_final: np.ndarray, columns: Columns, rows: np.ndarray
    ) -> Layout:
        """A layout of this size, on the host; its rows are among its columns."""
        padded = {
            "rows": _pad(rows, size.num_rows, self._passes.sink),
            "given_starts": _pad(columns["given_starts"], size.num_rows),
            "chunk_at": np.arange(size.num_tokens),
            "chunk_tokens": _pad(columns["chunk_tokens"], size.num_tokens),
        }
        if "successors" in columns:
            padded["successors"] = _pad(columns["successors"], size.num_tokens)
        batch = Batch.of_chunks(widths, is_final, size, self._shape)
        return Layout(
            batch,
            None,
            pairs="successors" in columns,
            chunks=padded,
            tile_len_max=size.tile_len,
            num_tiles=size.num_tiles,
        )

    def _capture(self, size: ChunkSize) -> CapturedChunks | None:
        """Capture chunks that are all the sink's."""
        names = ["given_starts", "chunk_tokens", *(["successors"] if self._passes.drafter is not None else [])]
        layout = self._padded(size, _NONE, _NONE.astype(np.bool_), dict.fromkeys(names, _NONE), _NONE)
        memory = self._device.send({"packed": layout.packed})["packed"]
        sent = layout.parts(memory)
        rows_host = layout.arrays["rows"]
        starts = np.zeros_like(rows_host) if self._needs_host_lengths else None
        inputs = Inputs(layout=layout, rows=sent["rows"], rows_host=rows_host, starts_host=starts)
        name = f"{size.chunks} chunks of {size.tokens} tokens"
        step = capture(name, self._passes, inputs, self._device, prepare=lambda: layout.take(sent))
        return None if step is None else CapturedChunks(size=size, memory=memory, step=step)


def _pad(column: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    """A column with as many entries as were captured."""
    return np.concatenate([column, np.full(length - len(column), value)])
