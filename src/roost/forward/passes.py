"""Passes: the device's part of a step, from rows to results, without a look at the host's numbers.

`ahead` drafts, runs the target and gives logits; `behind` takes the sampled tokens, accepts, moves KV, lets the drafter
take over and advances the relay: the values by row that the next step needs before the host knows them. Shapes depend
on the layout alone, so both can be captured. A pass that breaks leaves the relay as it was. Called by the runner.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.attention.kv_cache import Pool, Table
from roost.attention.protocol import Lane, Runs, attend_through, make_attention
from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.drafters.accept import Accepted, accept
from roost.drafters.make import Parts, make_drafter
from roost.drafters.protocol import Drafter, Pairs, Rounds
from roost.drafters.tree import NOTHING, Trees, chains
from roost.forward.layout import Batch, Layout
from roost.forward.lengths import Lengths
from roost.models.model import Head, Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """What a step starts from."""

    layout: Layout
    rows: Tensor  # [num_rows]
    rows_host: np.ndarray
    starts_host: np.ndarray | None  # lengths of the rows, where the backend needs them on the host


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ahead:
    """What a step knows before its tokens are drawn."""

    starts: Tensor  # [num_rows] position of each row's first token
    rows: Tensor  # [num_sampling]
    root_places: Tensor  # [num_sampling]
    node_offsets: Tensor  # [num_sampling] number of each one's first node
    node_roots: Tensor  # [num_nodes] which of the sampling rows each is of
    node_cells: Tensor  # [num_nodes] its place among the cells of the trees
    trees: Trees  # of the sampling rows
    positions: Tensor  # [num_nodes]
    hidden: Tensor  # [num_tokens, hidden_size]
    aux_hidden: tuple[Tensor, ...]
    logits: Tensor  # [num_nodes, vocab_size]

    def first(self, batch: Batch) -> "Ahead":
        """What is of the first rows, those of a batch; the rest is padding."""
        number, nodes, tokens = len(batch.sampling), int(batch.num_nodes.sum()), int(batch.widths.sum())
        return Ahead(
            starts=self.starts[: len(batch.widths)],
            rows=self.rows[:number],
            root_places=self.root_places[:number],
            node_offsets=self.node_offsets[:number],
            node_roots=self.node_roots[:nodes],
            node_cells=self.node_cells[:nodes],
            trees=self.trees.first(number),
            positions=self.positions[:nodes],
            hidden=self.hidden[:tokens],
            aux_hidden=tuple(each[:tokens] for each in self.aux_hidden),
            logits=self.logits[:nodes],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Done:
    """What a step did."""

    accepted: Accepted  # by sampling row
    result: Tensor  # [num_rows, 2 + accept_max] tokens added, length now, the tokens

    def first(self, batch: Batch) -> "Done":
        """What is of the first rows, those of a batch; the rest is padding."""
        return Done(accepted=self.accepted.first(len(batch.sampling)), result=self.result[: len(batch.widths)])


class Passes:
    """A model, its KV, its drafter if there is one, and the relay."""

    def __init__(self, model: Model, resolved: Resolved, device: Device, head: Head | None) -> None:
        self.model = model
        self.device = device
        self.attention = make_attention(resolved.backend, device)
        self.tables = [Table(resolved, book, device) for book in range(len(resolved.books))]
        windows = [kv.window for kv in model.kv]
        self.pools = [  # of the books that the model has layers in; a drafter's layers have their own
            Pool(table, [kv for kv in model.kv if kv.window == table.window])
            for table in self.tables
            if table.window in windows
        ]
        self.drafter = self._drafter(resolved, head)
        self.sink = resolved.num_rows  # the row that padding stands for
        self.lengths = Lengths(resolved.num_rows + 1, device.torch)  # the relay, by row
        self.roots = torch.zeros(resolved.num_rows + 1, dtype=torch.int64, device=device.torch)
        self._places = _places(windows, self.pools)

    def ahead(self, inputs: Inputs) -> Ahead:
        """From rows to logits; KV is written on the way."""
        layout, rows = inputs.layout, inputs.rows
        starts = self.lengths.device[rows]
        if "given_starts" in layout.sent:  # a chunk's start is the host's to say
            starts = torch.where(layout["given_starts"] < 0, starts, layout["given_starts"])
        root_rows = rows[layout["sampling"]]
        root_places = starts[layout["sampling"]] + layout["root_ramps"]
        trees = self._trees(inputs, root_rows)
        positions = root_places[layout["node_roots"]]
        if trees.width > 1:
            positions = positions + trees.depths.flatten()[layout["node_cells"]]
        hidden, aux_hidden = self._forward(inputs, starts, trees, positions)
        logits = self.model.logits(hidden if layout.batch.is_rounds else hidden[layout["node_tokens"]])
        return Ahead(
            starts=starts,
            rows=root_rows,
            root_places=root_places,
            node_offsets=layout["node_offsets"],
            node_roots=layout["node_roots"],
            node_cells=layout["node_cells"],
            trees=trees,
            positions=positions,
            hidden=hidden,
            aux_hidden=aux_hidden,
            logits=logits,
        )

    def behind(self, inputs: Inputs, ahead: Ahead, sampled: Tensor) -> Done:
        """Take over the tokens [num_nodes] that were drawn after each node."""
        layout, batch, trees = inputs.layout, inputs.layout.batch, ahead.trees
        targets = torch.full_like(trees.tokens, NOTHING)
        targets.view(-1)[layout["node_cells"]] = sampled
        accepted = accept(trees, targets, batch.shape.accept_max_of(trees.width))
        if batch.shape.topk > 1 and len(batch.drafting):
            self._move_accepted(ahead, accepted)
        if self.drafter is not None:
            self.drafter.extend(self._pairs(inputs, ahead, accepted))
        ends = ahead.starts + layout["tokens.widths"]
        ends[layout["sampling"]] = ahead.root_places + accepted.lens
        ends = ends.masked_fill(inputs.rows == self.sink, 0)
        self.lengths.move(inputs.rows, ends)
        self.roots[ahead.rows] = accepted.tokens.gather(1, accepted.lens[:, None] - 1).squeeze(1)
        result = ends.new_zeros(len(ends), 2 + accepted.tokens.shape[1])
        result[:, 1] = ends
        result[layout["sampling"], 0] = accepted.lens
        result[layout["sampling"], 2:] = accepted.tokens
        return Done(accepted=accepted, result=result)

    def _trees(self, inputs: Inputs, rows: Tensor) -> Trees:
        """The nodes of every sampling row: drafts, or the root alone."""
        layout, batch = inputs.layout, inputs.layout.batch
        roots = self.roots[rows]  # of no meaning for a chunk, whose last token the host knows
        if self.drafter is None or not len(batch.drafting):
            return chains(roots[:, None])
        at, starts = layout["drafting"], inputs.starts_host
        rounds = Rounds(
            rows=rows[at],
            rows_host=inputs.rows_host[batch.drafting].tolist(),
            starts=None if starts is None else starts[batch.drafting].tolist(),
            lengths=self.lengths.device[rows[at]],
            roots=roots[at],
            width=batch.tree_width,
        )
        drafted = self.drafter.propose(rounds).cut(layout["draft_widths"])
        if len(batch.drafting) == len(batch.sampling):
            return drafted
        single = roots.new_full((len(roots), batch.tree_width), NOTHING)
        single[:, 0] = roots
        return chains(single).with_rounds(at, drafted)

    def _forward(
        self, inputs: Inputs, starts: Tensor, trees: Trees, node_positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of every token of the step, and what the drafter wants to see."""
        layout, batch = inputs.layout, inputs.layout.batch
        rows = inputs.rows[layout["token_runs"]]
        places = starts[layout["token_runs"]] + layout["token_ramps"]
        if batch.is_rounds:
            tokens, positions = trees.tokens.flatten()[layout["node_cells"]], node_positions
        else:
            tokens, positions = torch.zeros_like(rows), places.clone()
            tokens[layout["node_tokens"]] = trees.tokens.flatten()[layout["node_cells"]]
            positions[layout["node_tokens"]] = node_positions
            tokens[layout["chunk_at"]] = layout["chunk_tokens"]  # the host's to say
        runs = Runs(
            cut=layout.tokens,
            rows=inputs.rows,
            starts=starts,
            rows_host=inputs.rows_host,
            starts_host=inputs.starts_host,
            trees=trees if batch.shape.topk > 1 and len(batch.drafting) else None,
        )
        lanes = [
            Lane(pool=pool, slots=pool.table.slots(rows, places), read=self.attention.read(pool.table, runs, pool.kv))
            for pool in self.pools
        ]
        attend = attend_through(self.attention, lanes, self._places)
        if self.drafter is None or not self.drafter.aux_layers:
            return self.model.forward(tokens, positions, attend), ()
        return self.model.forward_with_aux(tokens, positions, attend, self.drafter.aux_layers)

    def _move_accepted(self, ahead: Ahead, accepted: Accepted) -> None:
        """Bring the accepted path's KV to the front; what is not accepted stays where it is."""
        number = torch.arange(accepted.nodes.shape[1], device=accepted.nodes.device)
        roots = ahead.root_places[:, None]
        sources = roots + accepted.nodes
        dests = torch.where(number < accepted.lens[:, None], roots + number, sources)
        for pool in self.pools:  # of every book
            slots = [pool.table.slots(ahead.rows[:, None], each) for each in (sources, dests)]
            self.attention.copy(pool, *slots)

    def _pairs(self, inputs: Inputs, ahead: Ahead, accepted: Accepted) -> Pairs:
        """What the drafter takes over: each position with its successor."""
        layout = inputs.layout
        assert layout.pairs is not None
        sources = layout["pair_sources"].clone()
        tokens = layout["successors"].clone() if "successors" in layout.sent else torch.zeros_like(sources)
        tokens[layout["pair_at"]] = accepted.tokens.clamp(min=0).flatten()[layout["pair_cells"]]
        sources[layout["pair_at"]] = layout["pair_roots"] + accepted.nodes.flatten()[layout["pair_cells"]]
        runs = Runs(
            cut=layout.pairs,
            rows=inputs.rows,
            starts=ahead.starts,
            rows_host=inputs.rows_host,
            starts_host=inputs.starts_host,
            trees=None,
        )
        return Pairs(
            runs=runs,
            rows=inputs.rows[layout["pair_runs"]],
            positions=ahead.starts[layout["pair_runs"]] + layout["pair_ramps"],
            tokens=tokens,
            sources=sources,
            last=ahead.hidden,
            aux_hidden=ahead.aux_hidden,
            heads=layout["pair_firsts"] + accepted.lens - 1,
            head_rows=ahead.rows,
        )

    def _drafter(self, resolved: Resolved, head: Head | None) -> Drafter | None:
        """The drafter of a configuration."""
        return make_drafter(
            Parts(
                resolved=resolved,
                model=self.model,
                head=head,
                table=self.tables[0],
                attention=self.attention,
                device=self.device,
            )
        )


def _places(windows: list[int | None], pools: list[Pool]) -> list[tuple[int, int]]:
    """For each layer its pool, and its index among that pool's layers."""
    pool_windows = [pool.table.window for pool in pools]
    return [(pool_windows.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)]
