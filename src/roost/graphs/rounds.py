"""Round graphs: decode and verify rounds, captured at a few batch sizes.

A graph of rounds reads its rows from a buffer and everything else from the device's own state: a replay needs rows and
nothing more. Beside each there is a graph that drafts for its rows and does nothing else: the rounds of a step with
chunks are verified by a graph of `graphs.mixed`. Owns the captured tensors. Called by the runner.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from roost.config.resolved import Resolved
from roost.device.device import Device, Replay
from roost.errors import InvariantError
from roost.forward.layout import StepLayout, padded, rounds_layout
from roost.forward.passes import Passes
from roost.graph_sizes import graph_sizes
from roost.graphs.buffers import BufferSizes, check_fits, round_sizes
from roost.graphs.capture import Forwarded, GraphedStep, capture


@dataclass(slots=True, kw_only=True, eq=False)
class GraphedRounds:
    """One batch size and width."""

    sizes: BufferSizes
    rows_host: np.ndarray  # what the rows on the device are
    step: GraphedStep
    drafts_name: str
    replay_drafts: Replay | None  # None where there is nothing to draft, or no step to draft for


class RoundGraphs:
    """Graphs of rounds, by batch size and width."""

    def __init__(self, passes: Passes, resolved: Resolved, device: Device) -> None:
        self._passes, self._resolved, self._device = passes, resolved, device
        self.by_size: dict[tuple[int, int], GraphedRounds] = {}
        for number, width in graph_sizes(resolved.widths, resolved.sched.max_running):  # the largest needs most room
            self._capture(number, width)

    def find(self, number: int, width: int) -> GraphedRounds | None:
        """The smallest that holds `number` rounds of `width` nodes."""
        sizes = [size for size, nodes in self.by_size if nodes == width and size >= number]
        return self.by_size[min(sizes), width] if sizes else None

    def load(self, rounds: GraphedRounds, rows: np.ndarray, width: int) -> GraphedStep:
        """Put the rows of a step in place; the rest is the padding row."""
        needed = round_sizes(len(rows), width, self._resolved.spec)
        check_fits(needed, rounds.sizes, f"a graph of {rounds.sizes.rows} rounds")
        all_rows = padded(rows, rounds.sizes.rows, self._passes.padding_row)
        if not np.array_equal(all_rows, rounds.rows_host):
            rounds.step.layout.rows.copy_(self._device.send({"rows": all_rows})["rows"])
            rounds.rows_host = all_rows
        return rounds.step

    def _capture(self, number: int, width: int) -> None:
        """Capture rounds of the padding row."""
        passes, resolved = self._passes, self._resolved
        sizes = round_sizes(number, width, resolved.spec)
        layout = rounds_layout(number, width, resolved.spec)
        layout.lay_out(has_drafter=passes.drafter is not None, tile_len_max=resolved.backend.tile_len_max)
        layout.send(self._device)
        rows_host = np.full(number, passes.padding_row)
        rows = torch.full((number,), passes.padding_row, device=self._device.torch)
        layout = layout.at(rows, rows_host, None)

        def forward() -> Forwarded:
            target = passes.draft_and_forward(layout)
            logits = passes.logits(layout, target)
            return Forwarded(target=target, logits=logits, drawn=passes.model.ops.argmax(logits).view(number, width))

        step = capture(f"{number} rounds of {width}", passes, layout, self._device, forward)
        if step is None:
            return
        self._check(step, sizes)
        drafts_name = f"drafts of {number} rounds of {width}"
        self.by_size[number, width] = GraphedRounds(
            sizes=sizes,
            rows_host=rows_host,
            step=step,
            drafts_name=drafts_name,
            replay_drafts=self._capture_drafts(layout, drafts_name),
        )

    def _capture_drafts(self, layout: StepLayout, name: str) -> Replay | None:
        """Capture the drafting alone, for steps that have chunks besides."""
        if not len(layout.drafting) or not self._resolved.sched.mixed:
            return None
        starts = np.zeros_like(layout.rows_host)
        self._passes.attention.before_replay(name, layout.rows_host, layout.query_lens, starts)
        replay_drafts = self._device.capture(lambda: self._passes.draft_by_row(layout))
        assert replay_drafts is not None
        replay_drafts()  # as that of a step
        return replay_drafts

    def _check(self, step: GraphedStep, sizes: BufferSizes) -> None:
        """Refuse a graph whose buffers are not as stated."""
        found = replace(
            sizes,
            rows=len(step.layout.rows),
            nodes=step.forwarded.drawn.numel(),
            mask=step.forwarded.target.trees.mask.numel() if sizes.mask else 0,
            pairs=int(step.layout.num_pairs.sum()),
            accepted=step.accepted.tokens.numel(),
        )
        if found != sizes:
            raise InvariantError(f"a graph of rounds has buffers of {found}, and should have {sizes}")
