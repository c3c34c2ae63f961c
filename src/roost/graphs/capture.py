"""Capture: the two passes of a step, kept for replays.

A replay reads the memory that the passes were captured with and writes where they wrote then. Between the two, tokens
may be put in place of the greedy ones. Whoever captures fills the memory first, and pads it with the sink's rows: what
those write goes to the null page, what they say is not looked at. Called by graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from roost.device.device import Device, Replay
from roost.forward.passes import Ahead, Done, Inputs, Passes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """A step that can be replayed."""

    name: str  # tells it from other graphs
    inputs: Inputs  # held, since a replay reads the memory of all of it
    ahead: Ahead
    sampled: Tensor  # [num_nodes] greedy tokens, unless somebody puts others there
    done: Done
    run_ahead: Replay
    run_behind: Replay


def capture(
    name: str, passes: Passes, inputs: Inputs, device: Device, prepare: Callable[[], None] = lambda: None
) -> Captured | None:
    """Capture a step of the sink's rows, and what prepares its inputs; None where there are no graphs."""
    firsts: list[tuple[Ahead, Tensor]] = []  # of each run the tensors; the last run is the captured one
    seconds: list[Done] = []

    def ahead() -> None:
        prepare()
        made = passes.ahead(inputs)
        firsts[:] = [(made, passes.model.ops.argmax(made.logits))]

    def behind() -> None:
        seconds[:] = [passes.behind(inputs, *firsts[0])]

    passes.attention.before_replay(name, inputs.rows_host, inputs.layout.batch.widths, inputs.starts_host)
    run_ahead = device.capture(ahead)
    if run_ahead is None:
        return None
    run_ahead()  # what `behind` is captured with must hold something
    run_behind = device.capture(behind)
    assert run_behind is not None
    run_behind()  # the first replay takes the host a millisecond more, and would count as what a step costs
    return Captured(
        name=name,
        inputs=inputs,
        ahead=firsts[0][0],
        sampled=firsts[0][1],
        done=seconds[0],
        run_ahead=run_ahead,
        run_behind=run_behind,
    )
