"""Graphs: rounds that were captured once, at a few batch sizes, and are replayed.

A captured round reads its rows from a buffer and everything else from the device's own state: a replay needs rows and
nothing more. Rows past the real ones are the sink's: what they write goes to the sink page, what they say is not looked
at. Between the two passes tokens may be drawn otherwise than greedily. Owns the captured tensors. Called by the runner.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from roost.config import Resolved
from roost.errors import InvariantError
from roost.exec.batch import Batch, Layout
from roost.exec.device.device import Device, Replay
from roost.exec.passes import Ahead, Done, Inputs, Passes
from roost.exec.sizes import Sizes, check_fits, round_sizes


@dataclass(slots=True, kw_only=True, eq=False)
class Captured:
    """One batch size and width."""

    sizes: Sizes
    rows_host: np.ndarray  # what the rows on the device are
    inputs: Inputs  # held, since a replay reads the memory of all of it
    ahead: Ahead
    sampled: Tensor  # [num_nodes] greedy tokens, unless somebody puts others there
    done: Done
    run_ahead: Replay
    run_behind: Replay


class Graphs:
    """Captured rounds, by batch size and width."""

    def __init__(self, passes: Passes, resolved: Resolved, device: Device) -> None:
        self._passes, self._resolved, self._device = passes, resolved, device
        self._captured: dict[tuple[int, int], Captured] = {}
        for batch, width in resolved.widths.captured(resolved.sched.max_running):  # the largest needs most room
            self._capture(batch, width)

    def find(self, number: int, width: int) -> Captured | None:
        """The smallest that holds `number` rounds of `width` nodes."""
        sizes = [batch for batch, nodes in self._captured if nodes == width and batch >= number]
        return self._captured[min(sizes), width] if sizes else None

    def load(self, captured: Captured, rows: np.ndarray, width: int) -> None:
        """Put the rows of a step in place; the rest is the sink's."""
        needed = round_sizes(len(rows), width, self._resolved.spec, self._resolved.page_size)
        check_fits(needed, captured.sizes, f"a captured round of {captured.sizes.rows} rows")
        padded = np.full(captured.sizes.rows, self._passes.sink)
        padded[: len(rows)] = rows
        if not np.array_equal(padded, captured.rows_host):
            captured.inputs.rows.copy_(self._device.send({"rows": padded})["rows"])
            captured.rows_host = padded

    def _capture(self, number: int, width: int) -> None:
        """Capture rounds that are all the sink's."""
        passes, resolved = self._passes, self._resolved
        batch = Batch.of_rounds(number, width, resolved.spec)
        sizes = round_sizes(number, width, resolved.spec, resolved.page_size)
        layout = Layout(batch, self._device, pairs=passes.drafter is not None, chunks={})
        rows_host = np.full(number, passes.sink)
        rows = torch.full((number,), passes.sink, device=self._device.torch)
        inputs = Inputs(layout=layout, rows=rows, rows_host=rows_host, starts_host=None)
        firsts: list[tuple[Ahead, Tensor]] = []  # of each run the tensors; the last run is the captured one
        seconds: list[Done] = []

        def ahead() -> None:
            made = passes.ahead(inputs)
            firsts[:] = [(made, passes.model.ops.argmax(made.logits))]

        def behind() -> None:
            seconds[:] = [passes.behind(inputs, *firsts[0])]

        run_ahead = self._device.capture(ahead)
        if run_ahead is None:
            return
        run_ahead()  # what `behind` is captured with must hold something
        run_behind = self._device.capture(behind)
        assert run_behind is not None
        run_behind()  # the first replay takes the host a millisecond more, and would count as what a step costs
        made, done = firsts[0][0], seconds[0]
        found = replace(
            sizes,
            rows=len(rows),
            nodes=len(made.logits),
            mask=made.trees.sees.numel() if sizes.mask else 0,
            pairs=int(batch.num_pairs.sum()),
            accepted=done.accepted.tokens.numel(),
        )
        if found != sizes:
            raise InvariantError(f"a captured round has buffers of {found}, and should have {sizes}")
        self._captured[number, width] = Captured(
            sizes=sizes,
            rows_host=rows_host,
            inputs=inputs,
            ahead=made,
            sampled=firsts[0][1],
            done=done,
            run_ahead=run_ahead,
            run_behind=run_behind,
        )
