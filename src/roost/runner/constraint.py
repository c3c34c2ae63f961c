"""Constraint: the rows of one step whose outputs must match a grammar, from their drafts to their masks.

Before the target runs, drafts come to the host, and tokens that a grammar forces take their place; while it runs, the
masks of all nodes are computed; they are applied before anything else looks at the logits. When the step's tokens are
on the host, the matchers go on. Steps without such rows never come here. Called by the runner.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Device, Fetched
from roost.drafters.tree import RowTrees, Trees, with_chain
from roost.forward.layout import StepLayout
from roost.grammar.matcher import num_words
from roost.grammar.rows import GrammarRows
from roost.layers.ops import Ops
from roost.layers.rounds import NOTHING
from roost.messages import GRAMMAR_FAULT
from roost.step import StepPlan

_ALL = -1  # a word of a mask that allows everything


class Constraint:
    """The constrained rows of one step."""

    def __init__(self, grammars: GrammarRows, plan: StepPlan, layout: StepLayout, places: list[int]) -> None:
        self._grammars = grammars
        self._places = places  # of its rows among those that sample
        self._at = layout.sampling[places]  # their places among all rows of the step
        self._rows: list[int] = plan.rows[self._at].tolist()
        self._steps = plan.shape.depth_max  # drafts that a round can accept
        num_nodes = layout.num_nodes
        self._num_nodes: list[int] = num_nodes[places].tolist()
        self._first_nodes: list[int] = (np.cumsum(num_nodes) - num_nodes)[places].tolist()
        self._is_drafted = [bool(plan.query_lens[at] > 1 and not plan.is_prefill[at]) for at in self._at.tolist()]
        self._tokens = [[0] * number for number in self._num_nodes]  # of each row's nodes; the root's are not looked at
        self._parents = [[max(0, node - 1) for node in range(number)] for number in self._num_nodes]
        self._forced: list[list[int]] = [[] for _ in places]  # places among each row's drafts on its first path
        self._num_rows = len(plan.rows)
        self.errors: dict[int, str] = {}  # by place in the step: why a row's grammar cannot be followed

    @property
    def has_drafts(self) -> bool:
        """Whether a row carries drafts."""
        return any(self._is_drafted)

    def forced(self, layout: StepLayout, device: Device) -> Tensor | None:
        """What a drafter should go on from: the first drafts of each round that are forced, NOTHING from there on.

        None if there are none, and where the device does not wait for the host to know.
        """
        if device.runs_beside_the_host or not self.has_drafts:
            return None
        drafting = layout.drafting.tolist()
        found = np.full((len(drafting), layout.tree_width - 1), NOTHING, dtype=np.int64)
        for at, row, is_drafted in zip(self._at.tolist(), self._rows, self._is_drafted, strict=True):
            if is_drafted:
                way = self._grammars.only_way(row, found.shape[1])
                found[drafting.index(at), : len(way)] = way
        return torch.from_numpy(found) if (found >= 0).any() else None

    def edit(self, proposed: Trees, layout: StepLayout, device: Device) -> Trees:
        """The drafts of a step, one tree for each round that carries any, with what grammars force."""
        trees = proposed.fetch(device) if device.runs_beside_the_host else proposed
        drafting, found = layout.drafting.tolist(), trees
        for i, at in enumerate(self._at.tolist()):
            if self._is_drafted[i]:
                trees = self._edited(i, drafting.index(at), trees)
        return proposed if trees is found else trees.on(device) if device.runs_beside_the_host else trees

    def edit_by_row(self, trees: RowTrees, width: int, device: Device) -> Callable[[], None]:
        """The same for drafts that lie by row on the device, of trees that are `width` nodes wide.

        They are on their way to the host when this returns; what it returns waits for them.
        """
        drafted = [i for i, is_drafted in enumerate(self._is_drafted) if is_drafted]
        rows = device.put(np.array([self._rows[i] for i in drafted], dtype=np.int64))
        fetched = trees.fetch(rows, width, device)

        def edit() -> None:
            self._grammars.catch_up()
            found = edited = fetched()
            for number, i in enumerate(drafted):
                edited = self._edited(i, number, edited)
            if edited is not found:
                trees.put(rows, edited.on(device))

        return edit

    def _edited(self, i: int, number: int, trees: Trees) -> Trees:
        """The trees with those of one round changed; they are in the host's memory."""
        row, width = self._rows[i], self._num_nodes[i]
        tokens = trees.tokens[number, :width].tolist()
        if trees.are_chains:
            drafts = tokens[1:]
            self._forced[i] = self._grammars.force(row, drafts)
            if self._forced[i]:
                trees = replace(trees, tokens=trees.tokens.clone())
                trees.tokens[number, 1:width] = trees.tokens.new_tensor(drafts)
        else:
            drafts = self._grammars.only_way(row, self._steps)
            self._forced[i] = list(range(len(drafts)))
            if drafts:
                trees = with_chain(trees, number, drafts)
            self._parents[i] = trees.parents[number, :width].tolist()
        self._tokens[i] = trees.tokens[number, :width].tolist()
        return trees

    def mask(self, logits: Tensor, ops: Ops, device: Device) -> None:
        """Take what grammars forbid out of logits [num_nodes, vocab_size]."""
        masks = np.full((sum(self._num_nodes), num_words(logits.shape[1])), _ALL, dtype=np.int32)
        nodes: list[int] = []
        first = 0
        for i, (row, number) in enumerate(zip(self._rows, self._num_nodes, strict=True)):
            self._grammars.fill(row, self._tokens[i], self._parents[i], masks[first : first + number])
            if error := self._grammars.error(row):
                self.errors[int(self._at[i])] = GRAMMAR_FAULT + error
            nodes += range(self._first_nodes[i], self._first_nodes[i] + number)
            first += number
        ops.mask_logits(logits, device.put(np.array(nodes, dtype=np.int64)), device.put(masks))

    def follow(self, fetched: Fetched) -> None:
        """Have the matchers go on, once the step's result is on the host."""

        def accepted() -> list[list[int]]:
            result = fetched()[0]
            return [row[2 : 2 + row[0]].tolist() for row in result[self._at]]

        self._grammars.follow(self._rows, accepted)

    def num_forced(self, accept_lens: np.ndarray) -> np.ndarray:
        """How many of the drafts that each row of the step accepted were forced."""
        counts = np.zeros(self._num_rows, dtype=np.int32)
        for at, places in zip(self._at.tolist(), self._forced, strict=True):
            counts[at] = sum(place < accept_lens[at] - 1 for place in places)
        return counts


def constraint_of(grammars: GrammarRows | None, plan: StepPlan, layout: StepLayout) -> Constraint | None:
    """The constrained rows of a step; None if there are none."""
    if grammars is None:
        return None
    places = grammars.places(plan.rows[layout.sampling].tolist())
    return Constraint(grammars, plan, layout, places) if places else None
