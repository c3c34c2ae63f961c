"""Chunk graphs: prefill chunks, captured at a few sizes.

Where everything lies is data here: a step is laid out on the host as ever, padded with chunks of the padding row to the
size that was captured, and put into that layout's memory in one transfer. A chunk that is not final samples nothing:
the padding row samples in its place. Owns the captured tensors. Called by the runner.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.forward.layout import HostColumns, StepLayout, chunk_columns, chunks_layout, padded
from roost.forward.passes import Passes
from roost.graph_sizes import ChunkSize, chunk_sizes
from roost.graphs.capture import GraphedStep, capture
from roost.step import StepPlan

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphedChunks:
    """One size."""

    size: ChunkSize
    memory: Tensor  # all columns of the layout, one after the other
    step: GraphedStep


class ChunkGraphs:
    """Graphs of chunks, by size."""

    def __init__(self, passes: Passes, resolved: Resolved, device: Device) -> None:
        self._passes, self._device, self._shape = passes, device, resolved.spec
        sched, tile_len = resolved.sched, resolved.backend.tile_len_max
        sizes = chunk_sizes(sched.chunk, sched.max_running, resolved.row_width, tile_len)
        made = [self._capture(size) for size in reversed(sizes)]  # the largest needs most room
        self._by_size = [each for each in reversed(made) if each is not None]

    def find(self, num_rows: int, num_tokens: int) -> GraphedChunks | None:
        """The smallest that holds so many chunks of so many tokens in all."""
        return next((each for each in self._by_size if each.size.holds(num_rows, num_tokens)), None)

    def load(self, chunks: GraphedChunks, plan: StepPlan, layout: StepLayout) -> GraphedStep:
        """Put the chunks of a step in place; the rest is the padding row."""
        columns = chunk_columns(plan, layout, has_drafter=self._passes.drafter is not None)
        full = self._padded(chunks.size, layout.query_lens, plan.is_final, columns, plan.rows)
        chunks.memory.copy_(self._device.send({"packed": full.packed})["packed"])
        return chunks.step

    def _padded(
        self, size: ChunkSize, query_lens: np.ndarray, is_final: np.ndarray, columns: HostColumns, rows: np.ndarray
    ) -> StepLayout:
        """A layout of this size, on the host; its rows are among its columns."""
        chunks = {
            "rows": padded(rows, size.num_rows, self._passes.padding_row),
            "chunk_starts": padded(columns["chunk_starts"], size.num_rows),
            "chunk_at": np.arange(size.num_tokens),
            "chunk_tokens": padded(columns["chunk_tokens"], size.num_tokens),
        }
        if "successors" in columns:
            chunks["successors"] = padded(columns["successors"], size.num_tokens)
        return chunks_layout(query_lens, is_final, size, self._shape).lay_out(
            has_drafter="successors" in columns, tile_len_max=size.tile_len, num_tiles=size.num_tiles, chunks=chunks
        )

    def _capture(self, size: ChunkSize) -> GraphedChunks | None:
        """Capture chunks of the padding row."""
        names = ["chunk_starts", "chunk_tokens", *(["successors"] if self._passes.drafter is not None else [])]
        layout = self._padded(size, _NONE, _NONE.astype(np.bool_), dict.fromkeys(names, _NONE), _NONE)
        memory = self._device.send({"packed": layout.packed})["packed"]
        sent, rows_host = layout.unpacked(memory), layout.columns["rows"]
        layout = layout.at(sent["rows"], rows_host, None)
        name = f"{size.chunks} chunks of {size.tokens} tokens"
        step = capture(name, self._passes, layout, self._device, prepare=lambda: layout.take(sent))
        return None if step is None else GraphedChunks(size=size, memory=memory, step=step)
