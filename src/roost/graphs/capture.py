"""Capture: a step's two halves as CUDA graphs, up to its hidden states or logits and from its drawn tokens on.

A replay reads the memory that the passes were captured with and writes where they wrote then. Between the two, tokens
are drawn, or put in place of the greedy ones. Whoever captures fills the memory first, and pads it with the padding
row: what that writes goes to the null page, what it gives is not looked at. Called by the other modules of this folder.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from roost.device.device import Device, Replay
from roost.drafters.accept import Accepted
from roost.forward.layout import StepLayout
from roost.forward.passes import Passes, TargetOutput


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forwarded:
    """What the first half of a captured step gives."""

    target: TargetOutput
    logits: Tensor | None  # [num_nodes, vocab_size]; None: the replay's caller makes them, of the step's own nodes
    drawn: Tensor  # [num_sampling, tree_width] greedy tokens where there are logits; somebody may put others there


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphedStep:
    """A step that can be replayed. Held whole, since a replay reads the memory of all of it."""

    name: str  # tells it from other graphs
    layout: StepLayout
    forwarded: Forwarded
    accepted: Accepted
    result: Tensor  # [num_rows, 2 + accept_max], and what was looked up
    replay_forward: Replay
    replay_accept: Replay


def capture(
    name: str, passes: Passes, layout: StepLayout, device: Device, forward: Callable[[], Forwarded]
) -> GraphedStep | None:
    """Capture a step of padding rows whose first half is `forward`; None where there are no graphs."""
    firsts: list[Forwarded] = []  # of the last run, which is the captured one
    results: list[tuple[Accepted, Tensor]] = []

    def run_forward() -> None:
        firsts[:] = [forward()]

    def accept() -> None:
        results[:] = [passes.accept_and_extend(layout, firsts[0].target, firsts[0].drawn)]

    passes.attention.before_replay(name, layout.rows_host, layout.query_lens, np.zeros_like(layout.rows_host))
    replay_forward = device.capture(run_forward)
    if replay_forward is None:
        return None
    replay_forward()  # what `accept` is captured with must hold something
    replay_accept = device.capture(accept)
    assert replay_accept is not None
    replay_accept()  # the first replay takes the host a millisecond more, and would count as what a step costs
    return GraphedStep(
        name=name,
        layout=layout,
        forwarded=firsts[0],
        accepted=results[0][0],
        result=results[0][1],
        replay_forward=replay_forward,
        replay_accept=replay_accept,
    )
