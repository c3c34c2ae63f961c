"""Shown tree: the tree that was drafted for one row, brought back with a step's result for people who watch.

Called by the runner, for one step now and then.
"""

import numpy as np
from torch import Tensor

from roost.drafters.accept import Accepted
from roost.drafters.tree import Trees
from roost.forward.layout import StepLayout
from roost.step import DraftTree, StepPlan

TREE_COLUMNS = 3


def place_of(plan: StepPlan, layout: StepLayout) -> int:
    """Which of the rows that sample is to be shown; -1: none."""
    if plan.shown_row < 0:
        return -1
    places = np.flatnonzero((plan.rows[layout.sampling] == plan.shown_row) & ~plan.is_prefill[layout.sampling])
    return int(places[0]) if len(places) else -1


def tree_columns(place: int, trees: Trees, accepted: Accepted) -> tuple[Tensor, ...]:
    """What the device knows of the tree at a place."""
    if place < 0:
        return ()
    return trees.tokens[place], trees.parents[place], accepted.nodes[place]


def shown_tree(place: int, num_accepted: int, columns: list[np.ndarray]) -> DraftTree:
    """The same as the host keeps it."""
    tokens, parents, nodes = (column.astype(np.int32) for column in columns)
    number = max(1, int((tokens >= 0).sum()))  # nodes come one after the other; what is missing is at the end
    parents = parents[:number].copy()
    parents[0] = -1
    return DraftTree(place=place, tokens=tokens[:number], parents=parents, accepted=nodes[:num_accepted])
