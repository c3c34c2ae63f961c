"""Mixed graphs: steps with prefill chunks, alone or beside rounds, captured by their number of tokens and nothing else.

Of which row a token is, whether the host says it or a tree has it, where its row starts, which tokens are nodes: all
of that are columns in the graph's memory, filled in one transfer and padded. So one graph holds any chunks and rounds
of N tokens, of any width, and the weights are read once. Rounds are drafted for before, by a graph of `graphs.rounds`,
and their trees found by row. Logits are made between the halves, of the step's own nodes: padded, they would be its
widest product and most of what a graph keeps. Owns the captured tensors. Called by the runner.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.forward.layout import PAIRS, TOKENS, HostColumns, StepLayout, chunk_columns, plan_layout
from roost.forward.passes import Passes, TargetOutput
from roost.graph_sizes import batch_sizes
from roost.graphs.capture import Forwarded, GraphedStep, capture
from roost.step import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphedMixed:
    """One size."""

    num_tokens: int
    columns: "PaddedColumns"
    memory: Tensor  # all columns, one after the other
    step: GraphedStep


class MixedGraphs:
    """Graphs of steps with chunks, by number of tokens."""

    def __init__(self, passes: Passes, resolved: Resolved, device: Device) -> None:
        self._passes, self._resolved, self._device = passes, resolved, device
        self._tree_width = resolved.spec.tokens  # of the widest round: trees of others are padded to it
        made = [self._capture(size) for size in reversed(resolved.step_sizes)]  # the largest needs most room
        self._by_size = [each for each in reversed(made) if each is not None]
        widths, most = resolved.widths, resolved.sched.max_running
        self._logit_sizes = sorted({widths.num_nodes_max(number) for number in batch_sizes(most)})

    def find(self, num_tokens: int) -> GraphedMixed | None:
        """The smallest that holds a step of so many tokens."""
        return next((each for each in self._by_size if each.num_tokens >= num_tokens), None)

    def load(self, mixed: GraphedMixed, plan: StepPlan) -> StepLayout:
        """Put a step in place, whose layout this is; the rest is the padding row."""
        layout = plan_layout(plan, self._tree_width)
        self._lay_out(layout, chunk_columns(plan, layout, has_drafter=self._passes.drafter is not None))
        packed = mixed.columns.packed(layout.columns | {"rows": plan.rows})
        mixed.memory.copy_(self._device.send({"packed": packed})["packed"])
        return layout

    def logits(self, target: TargetOutput, num_nodes: int) -> Tensor:
        """Logits at the first nodes of what a graph gave, with padding up to a size that was warmed up."""
        size = next((each for each in self._logit_sizes if each >= num_nodes), num_nodes)
        return self._passes.model.logits(target.hidden[target.node_tokens[:size]])[:num_nodes]

    def warm_up_logits(self) -> None:
        """Make logits once at every size, the largest first: new memory, and new kernels, make the host wait.

        Once nothing is left to capture: that gives unused memory back to the driver.
        """
        model = self._passes.model
        for size in reversed(self._logit_sizes):
            hidden = torch.zeros((size, model.hidden_size), dtype=model.dtype, device=self._device.torch)
            model.ops.argmax(model.logits(hidden))

    def _lay_out(self, layout: StepLayout, chunks: HostColumns) -> None:
        tile_len_max, has_drafter = self._resolved.backend.tile_len_max, self._passes.drafter is not None
        layout.lay_out(has_drafter=has_drafter, tile_len_max=tile_len_max, chunks=chunks)

    def _capture(self, num_tokens: int) -> GraphedMixed | None:
        """Capture a step of padding."""
        passes, device, tile_len = self._passes, self._device, self._resolved.backend.tile_len_max
        num_rows = min(num_tokens, self._resolved.sched.max_running) + 1  # with the padding row, which is the last
        columns = PaddedColumns(num_tokens, num_rows, self._tree_width, tile_len, passes.padding_row)
        memory = device.send({"packed": columns.packed({})})["packed"]
        sent = columns.unpacked(memory)
        every = np.ones(num_rows, dtype=np.bool_)
        layout = StepLayout(np.zeros(num_rows), every, ~every, self._resolved.spec, self._tree_width)
        self._lay_out(layout, {})  # for the length of its tiles: what the columns hold, the memory says
        layout = layout.at(sent["rows"], np.full(num_rows, passes.padding_row), None)
        drawn = torch.zeros((num_rows, self._tree_width), dtype=torch.int64, device=device.torch)

        def forward() -> Forwarded:
            layout.take(sent)
            return Forwarded(target=passes.forward_drafted(layout), logits=None, drawn=drawn)

        step = capture(f"a step of {num_tokens} tokens", passes, layout, device, forward)
        if step is None:
            return None
        return GraphedMixed(num_tokens=num_tokens, columns=columns, memory=memory, step=step)


class PaddedColumns:
    """The columns of a step as a graph keeps them: each with as many entries as there can be, the rest padding.

    Padding is tokens of the padding row, which is the last one, at position 0; no tile of attention holds them, and no
    node is one of them. What samples in their place is the padding row, too.
    """

    def __init__(self, num_tokens: int, num_rows: int, tree_width: int, tile_len: int, padding_row: int) -> None:
        last = num_rows - 1  # both among the rows and among those that sample
        num_nodes = min(num_tokens, num_rows * tree_width)
        num_wide = num_tokens // tile_len + num_rows  # each row can end in the middle of one
        # name -> number of entries, and the value of padding
        self._entries: dict[str, tuple[int, int]] = {
            "rows": (num_rows, padding_row),
            "chunk_starts": (num_rows, 0),
            "chunk_tokens": (num_tokens, 0),
            "token_segment": (num_tokens, last),
            "token_index": (num_tokens, 0),
            "token_cells": (num_tokens, -1),
            "sampling": (num_rows, last),
            "root_index": (num_rows, 0),
            "num_nodes": (num_rows, 1),
            "node_offsets": (num_rows, 0),
            "node_tokens": (num_nodes, 0),
            "node_sampling": (num_nodes, last),
            "node_cells": (num_nodes, last * tree_width),
            "tokens.tree_of": (num_rows, -1),
            "pair_segment": (num_tokens, last),
            "pair_index": (num_tokens, 0),
            "pair_sources": (num_tokens, 0),
            "pair_cells": (num_tokens, -1),
            "successors": (num_tokens, 0),
            "accept_firsts": (num_rows, 0),
        }
        for batch in (TOKENS, PAIRS):
            self._entries |= {
                f"{batch}.offsets": (num_rows, 0),
                f"{batch}.query_lens": (num_rows, 0),
                f"{batch}.tile_segments": (num_rows, -1),
                f"{batch}.tile_offsets": (num_rows, 0),
                f"{batch}.wide_tile_segments": (num_wide, -1),
                f"{batch}.wide_tile_offsets": (num_wide, 0),
            }
        self._packed = np.zeros(sum(number for number, _ in self._entries.values()), dtype=np.int64)

    def packed(self, columns: HostColumns) -> np.ndarray:
        """The columns of a step, one after the other; the next call uses the same memory."""
        first = 0
        for name, (number, padding) in self._entries.items():
            column = columns.get(name, _NONE)
            assert len(column) <= number, (name, len(column), number)
            self._packed[first : first + len(column)] = column
            self._packed[first + len(column) : first + number] = padding
            first += number
        return self._packed

    def unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        """The columns in such memory of the device."""
        parts = packed.split([number for number, _ in self._entries.values()])
        return dict(zip(self._entries, parts, strict=True))


_NONE = np.zeros(0, dtype=np.int64)
