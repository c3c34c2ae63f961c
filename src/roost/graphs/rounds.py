"""Graphs: rounds that were captured once, at a few batch sizes, and are replayed.

A captured round reads its rows from a buffer and everything else from the device's own state: a replay needs rows and
nothing more. Owns the captured tensors. Called by the runner.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.errors import InvariantError
from roost.forward.layout import Batch, Layout
from roost.forward.passes import Inputs, Passes
from roost.forward.sizes import Sizes, check_fits, round_sizes
from roost.graphs.capture import Captured, capture


@dataclass(slots=True, kw_only=True, eq=False)
class CapturedRounds:
    """One batch size and width."""

    sizes: Sizes
    rows_host: np.ndarray  # what the rows on the device are
    step: Captured


class Graphs:
    """Captured rounds, by batch size and width."""

    def __init__(self, passes: Passes, resolved: Resolved, device: Device) -> None:
        self._passes, self._resolved, self._device = passes, resolved, device
        self._captured: dict[tuple[int, int], CapturedRounds] = {}
        for batch, width in resolved.widths.captured(resolved.sched.max_running):  # the largest needs most room
            self._capture(batch, width)

    def find(self, number: int, width: int) -> CapturedRounds | None:
        """The smallest that holds `number` rounds of `width` nodes."""
        sizes = [batch for batch, nodes in self._captured if nodes == width and batch >= number]
        return self._captured[min(sizes), width] if sizes else None

    def load(self, rounds: CapturedRounds, rows: np.ndarray, width: int) -> Captured:
        """Put the rows of a step in place; the rest is the sink's."""
        needed = round_sizes(len(rows), width, self._resolved.spec, self._resolved.page_size)
        check_fits(needed, rounds.sizes, f"a captured round of {rounds.sizes.rows} rows")
        padded = np.full(rounds.sizes.rows, self._passes.sink)
        padded[: len(rows)] = rows
        if not np.array_equal(padded, rounds.rows_host):
            rounds.step.inputs.rows.copy_(self._device.send({"rows": padded})["rows"])
            rounds.rows_host = padded
        return rounds.step

    def _capture(self, number: int, width: int) -> None:
        """Capture rounds that are all the sink's."""
        passes, resolved = self._passes, self._resolved
        batch = Batch.of_rounds(number, width, resolved.spec)
        sizes = round_sizes(number, width, resolved.spec, resolved.page_size)
        tile_len = resolved.backend.tile_len_max
        layout = Layout(batch, self._device, pairs=passes.drafter is not None, chunks={}, tile_len_max=tile_len)
        rows_host = np.full(number, passes.sink)
        rows = torch.full((number,), passes.sink, device=self._device.torch)
        starts = np.zeros_like(rows_host) if resolved.backend.needs_host_lengths else None
        inputs = Inputs(layout=layout, rows=rows, rows_host=rows_host, starts_host=starts)
        step = capture(f"{number} rounds of {width}", passes, inputs, self._device)
        if step is None:
            return
        found = replace(
            sizes,
            rows=len(rows),
            nodes=len(step.ahead.logits),
            mask=step.ahead.trees.sees.numel() if sizes.mask else 0,
            pairs=int(batch.num_pairs.sum()),
            accepted=step.done.accepted.tokens.numel(),
        )
        if found != sizes:
            raise InvariantError(f"a captured round has buffers of {found}, and should have {sizes}")
        self._captured[number, width] = CapturedRounds(sizes=sizes, rows_host=rows_host, step=step)
