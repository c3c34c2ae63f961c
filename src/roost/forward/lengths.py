"""Lengths of rows: on the device, where steps advance them, and mirrored on the host for code that needs them there.

The mirror of a step is one object with one door: `refresh(sync=True)` copies from the device, and only a step whose
lengths the host cannot know needs that; `refresh(sync=False)` only forgets the sum, which is computed when asked for.
Never seen by the control plane, which has bounds of its own. Called by the runner and the forward passes.
"""

import numpy as np
import torch
from torch import Tensor

from roost.step import Ints, StepPlan


class Lengths:
    """Device lengths by row, and the host's mirror of them."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.device = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.host_seen = np.zeros(num_rows, dtype=np.int64)  # as of the last step that advanced or refreshed a row

    def move(self, rows: Tensor, ends: Tensor) -> None:
        """The rows of a step are `ends` long now."""
        self.device[rows] = ends

    def of_step(self, plan: StepPlan) -> "StepLengths":
        """The lengths that a step starts from; after plain steps the host knows them without asking the device."""
        lengths = StepLengths(self, plan)
        lengths.refresh(sync=plan.shape.speculates)
        return lengths


class StepLengths:
    """Lengths of the rows of one step, in the plan's order."""

    def __init__(self, lengths: Lengths, plan: StepPlan) -> None:
        self._lengths = lengths
        self._plan = plan
        self._total: int | None = None  # unknown until asked for
        self.start_positions: Ints = np.empty(0, dtype=np.int32)

    def refresh(self, *, sync: bool) -> None:
        """The one door: take the rows' lengths anew, from the device if `sync`, else as the host last saw them."""
        plan, lengths = self._plan, self._lengths
        rounds = plan.rows[~plan.is_prefill] if plan.has_chunks else plan.rows
        if sync and len(rounds):
            lengths.host_seen[rounds] = lengths.device.cpu().numpy()[rounds]
        starts = lengths.host_seen[plan.rows].astype(np.int32)
        self.start_positions = np.where(plan.is_prefill, plan.start_positions, starts) if plan.has_chunks else starts
        self._total = None

    @property
    def ends(self) -> Ints:
        """Lengths if every token of the step is kept."""
        return self.start_positions + self._plan.query_lens

    @property
    def total(self) -> int:
        """Tokens that the step's rows hold while it runs: what attention reads."""
        if self._total is None:
            self._total = int(self.ends.sum())
        return self._total

    def advance(self) -> None:
        """The step has run; the host sees what it knows without asking."""
        plan, lengths = self._plan, self._lengths
        if not plan.shape.speculates:
            lengths.host_seen[plan.rows] = self.ends
        elif plan.has_chunks:
            lengths.host_seen[plan.rows[plan.is_prefill]] = self.ends[plan.is_prefill]
