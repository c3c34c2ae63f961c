"""Forward passes: the device's part of a step, from rows to results, without a look at the host's numbers.

`draft_and_forward` drafts, runs the target and gives logits; `accept_and_extend` takes the sampled tokens, accepts,
moves KV, lets the drafter take over and updates the row state: lengths and last tokens by row, which the next step
needs before the host knows them. Shapes depend on the layout alone, so both can be captured as CUDA graphs. Rows
of a pass that breaks start anew, with a chunk. Called by the runner and graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, PageTable
from roost.attention.protocol import attend_through, make_attention
from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.drafters.accept import Accepted, accept
from roost.drafters.make import Parts, make_drafter
from roost.drafters.protocol import Drafter, Pairs
from roost.drafters.tree import Trees, chains
from roost.errors import InvariantError
from roost.forward.layout import PAIRS, ROOTS, TOKENS, StepLayout
from roost.forward.lengths import Lengths
from roost.layers.rounds import NOTHING, ChainInputs, RowState
from roost.layers.segments import Segments
from roost.models.model import Head, Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetOutput:
    """What the target's pass gave: all that a step knows before its tokens are drawn."""

    layout: StepLayout  # that it ran with; a graph's may have more rows
    start_positions: Tensor  # [num_rows] position of each row's first token
    rows: Tensor  # [num_sampling] rows that sample
    root_positions: Tensor  # [num_sampling]
    trees: Trees  # of the sampling rows
    positions: Tensor  # [num_nodes]
    hidden: Tensor  # [num_tokens, hidden_size]
    aux_hidden: tuple[Tensor, ...]
    logits: Tensor  # [num_nodes, vocab_size]
    chains: ChainInputs | None = None  # the batch, where it is rounds that are chains of one width

    def first(self, step: StepLayout) -> "TargetOutput":
        """What is of the first rows, those of a step; the rest of a graph is padding."""
        number, nodes, tokens = len(step.sampling), int(step.num_nodes.sum()), int(step.query_lens.sum())
        return TargetOutput(
            layout=self.layout,
            start_positions=self.start_positions[: len(step.query_lens)],
            rows=self.rows[:number],
            root_positions=self.root_positions[:number],
            trees=self.trees.first(number),
            positions=self.positions[:nodes],
            hidden=self.hidden[:tokens],
            aux_hidden=tuple(each[:tokens] for each in self.aux_hidden),
            logits=self.logits[:nodes],
        )


class Passes:
    """A model, its KV, its drafter if there is one, and the row state."""

    def __init__(self, model: Model, resolved: Resolved, device: Device, head: Head | None) -> None:
        self.model = model
        self.device = device
        self.attention = make_attention(resolved.backend, device)
        self.tables = [PageTable(resolved, book, device) for book in range(len(resolved.books))]
        windows = [kv.window for kv in model.kv]
        self.kv_caches = [  # of the books that the model has layers in; a drafter's layers have their own
            KvCache(table, [kv for kv in model.kv if kv.window == table.window])
            for table in self.tables
            if table.window in windows
        ]
        self.drafter = self._drafter(resolved, head)
        self.padding_row = resolved.num_rows  # fills up the batches of graphs; all its pages are the null page
        self.lengths = Lengths(resolved.num_rows + 1, device.torch)  # the row state
        self.last_tokens = torch.zeros(resolved.num_rows + 1, dtype=torch.int64, device=device.torch)
        self._row_state = RowState(lengths=self.lengths.device, last_tokens=self.last_tokens)
        self._layers = _layers(windows, self.kv_caches)

    def draft_and_forward(self, layout: StepLayout) -> TargetOutput:
        """From rows to logits; KV is written on the way."""
        if self._are_chains(layout):
            return self._draft_and_forward_chains(layout)
        starts = self.lengths.device[layout.rows]
        if "chunk_starts" in layout:  # a chunk's start is the host's to say
            starts = torch.where(layout["chunk_starts"] < 0, starts, layout["chunk_starts"])
        rows = layout.rows[layout["sampling"]]
        root_positions = starts[layout["sampling"]] + layout["root_index"]
        trees = self._trees(layout, rows)
        positions = root_positions[layout["node_sampling"]]
        if trees.width > 1:
            positions = positions + trees.depths.flatten()[layout["node_cells"]]
        hidden, aux_hidden = self._forward(layout, starts, trees, positions)
        logits = self.model.logits(hidden if layout.is_rounds else hidden[layout["node_tokens"]])
        return TargetOutput(
            layout=layout,
            start_positions=starts,
            rows=rows,
            root_positions=root_positions,
            trees=trees,
            positions=positions,
            hidden=hidden,
            aux_hidden=aux_hidden,
            logits=logits,
        )

    def accept_and_extend(self, layout: StepLayout, target: TargetOutput, sampled: Tensor) -> tuple[Accepted, Tensor]:
        """Take over the tokens [num_nodes] that were drawn after each node.

        What the sampling rows accepted, and what the host is told of every row: [num_rows, 2 + accept_max] tokens
        added, length now, the tokens.
        """
        if target.chains is not None:
            return self._accept_and_extend_chains(layout, target, target.chains, sampled)
        trees = target.trees
        drawn = torch.full_like(trees.tokens, NOTHING)
        drawn.view(-1)[layout["node_cells"]] = sampled
        accepted = accept(trees, drawn, layout.shape.accept_max_of(trees.width))
        if layout.shape.topk > 1 and len(layout.drafting):
            self._move_accepted(target, accepted)
        if self.drafter is not None:
            self.drafter.extend(self._pairs(layout, target, accepted))
        lengths = target.start_positions + layout["tokens.query_lens"]
        lengths[layout["sampling"]] = target.root_positions + accepted.lens
        lengths = lengths.masked_fill(layout.rows == self.padding_row, 0)
        self.lengths.move(layout.rows, lengths)
        self.last_tokens[target.rows] = accepted.tokens.gather(1, accepted.lens[:, None] - 1).squeeze(1)
        result = lengths.new_zeros(len(lengths), 2 + accepted.tokens.shape[1])
        result[:, 1] = lengths
        result[layout["sampling"], 0] = accepted.lens
        result[layout["sampling"], 2:] = accepted.tokens
        return accepted, result

    # --- rounds that are chains of one width: what steady decoding is made of ---------------------------------

    def _are_chains(self, layout: StepLayout) -> bool:
        """Whether a step is such rounds."""
        return layout.is_even and layout.shape.topk == 1

    def _draft_and_forward_chains(self, layout: StepLayout) -> TargetOutput:
        """From rows to logits, with all index arithmetic in one operation."""
        rows, drafts = layout.rows, self._drafts(layout) if layout.tree_width > 1 else None
        pages = tuple(cache.table.of_rounds for cache in self.kv_caches)
        inputs = self.model.ops.chain_inputs(rows, self._row_state, drafts, pages)
        segments = layout.segments(TOKENS, rows, inputs.starts)
        tokens = inputs.tokens.flatten()
        hidden, aux_hidden = self._run_target(tokens, inputs.positions, inputs.slots, segments)
        return TargetOutput(
            layout=layout,
            start_positions=inputs.starts,
            rows=rows,
            root_positions=inputs.starts,
            trees=chains(inputs.tokens),
            positions=inputs.positions,
            hidden=hidden,
            aux_hidden=aux_hidden,
            logits=self.model.logits(hidden),
            chains=inputs,
        )

    def _drafts(self, layout: StepLayout) -> Tensor:
        """What is drafted for such rounds: [num_rows, W - 1]."""
        assert self.drafter is not None
        rounds = layout.segments(ROOTS, layout.rows, self.lengths.device[layout.rows])
        proposed = self.drafter.propose(rounds, self.last_tokens[layout.rows], layout.tree_width)
        _check_proposed(proposed, layout)
        return proposed.tokens[:, 1:]  # the root is the output's last token, whatever a drafter says

    def _accept_and_extend_chains(
        self, layout: StepLayout, target: TargetOutput, inputs: ChainInputs, sampled: Tensor
    ) -> tuple[Accepted, Tensor]:
        """What such rounds accept, again in one operation."""
        pages = self.tables[0].of_rounds
        settled = self.model.ops.settle_chains(layout.rows, self._row_state, inputs, sampled, self.padding_row, pages)
        accepted = Accepted(lens=settled.result[:, 0], tokens=settled.result[:, 2:], nodes=settled.nodes)
        if self.drafter is not None:
            self.drafter.extend(
                Pairs(
                    segments=layout.segments(PAIRS, layout.rows, inputs.starts),
                    rows=settled.pair_rows,
                    slots=settled.pair_slots,
                    positions=settled.pair_positions,
                    tokens=settled.pair_tokens,
                    sources=None,
                    hidden=target.hidden,
                    aux_hidden=target.aux_hidden,
                    sampling_rows=layout.rows,
                    last_pairs=settled.last_pairs,
                )
            )
        return accepted, settled.result

    # --- any step ------------------------------------------------------------------------------------------------

    def _trees(self, layout: StepLayout, rows: Tensor) -> Trees:
        """The nodes of every sampling row: drafts, or the root alone."""
        roots = self.last_tokens[rows]  # of no meaning for a chunk, whose last token the host knows
        if self.drafter is None or not len(layout.drafting):
            return chains(roots[:, None])
        at = layout["drafting"]
        rounds = layout.segments(ROOTS, rows[at], self.lengths.device[rows[at]])
        proposed = self.drafter.propose(rounds, roots[at], layout.tree_width)
        _check_proposed(proposed, layout)
        drafted = proposed.cut(layout["draft_widths"])
        drafted.tokens[:, 0] = roots[at]  # whatever a drafter says: the root is the output's last token
        if len(layout.drafting) == len(layout.sampling):
            return drafted
        single = roots.new_full((len(roots), layout.tree_width), NOTHING)
        single[:, 0] = roots
        return chains(single).with_rounds(at, drafted)

    def _forward(
        self, layout: StepLayout, starts: Tensor, trees: Trees, node_positions: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of every token of the step, and what the drafter wants to see."""
        rows = layout.rows[layout["token_segment"]]
        # where KV goes; the position of a tree's node is its depth
        places = starts[layout["token_segment"]] + layout["token_index"]
        if layout.is_rounds:
            tokens, positions = trees.tokens.flatten()[layout["node_cells"]], node_positions
        else:
            tokens, positions = torch.zeros_like(rows), places.clone()
            tokens[layout["node_tokens"]] = trees.tokens.flatten()[layout["node_cells"]]
            positions[layout["node_tokens"]] = node_positions
            tokens[layout["chunk_at"]] = layout["chunk_tokens"]  # the host's to say
        has_trees = layout.shape.topk > 1 and len(layout.drafting) > 0
        segments = layout.segments(TOKENS, layout.rows, starts, trees if has_trees else None)
        slots = [cache.table.slots(rows, places) for cache in self.kv_caches]
        return self._run_target(tokens, positions, slots, segments)

    def _run_target(
        self, tokens: Tensor, positions: Tensor, slots: Sequence[Tensor], segments: Segments
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of a flat batch, and what the drafter wants to see; KV goes to the slots of each cache."""
        attend = attend_through(self.attention, self.kv_caches, slots, segments, self._layers)
        if self.drafter is None or not self.drafter.aux_layers:
            return self.model.forward(tokens, positions, attend), ()
        return self.model.forward_with_aux(tokens, positions, attend, self.drafter.aux_layers)

    def _move_accepted(self, target: TargetOutput, accepted: Accepted) -> None:
        """Bring the accepted path's KV to the front; what is not accepted stays where it is."""
        number = torch.arange(accepted.nodes.shape[1], device=accepted.nodes.device)
        roots = target.root_positions[:, None]
        sources = roots + accepted.nodes
        dests = torch.where(number < accepted.lens[:, None], roots + number, sources)
        for cache in self.kv_caches:  # of every book
            slots = [cache.table.slots(target.rows[:, None], each) for each in (sources, dests)]
            self.attention.copy(cache, *slots)

    def _pairs(self, layout: StepLayout, target: TargetOutput, accepted: Accepted) -> Pairs:
        """What the drafter takes over: each position with its successor."""
        sources = layout["pair_sources"].clone()
        tokens = layout["successors"].clone() if "successors" in layout else torch.zeros_like(sources)
        at, cells = layout["accept_pairs"], layout["accept_cells"]
        tokens[at] = accepted.tokens.clamp(min=0).flatten()[cells]
        sources[at] = layout["accept_roots"] + accepted.nodes.flatten()[cells]
        rows = layout.rows[layout["pair_segment"]]
        positions = target.start_positions[layout["pair_segment"]] + layout["pair_index"]
        return Pairs(
            segments=layout.segments(PAIRS, layout.rows, target.start_positions),
            rows=rows,
            slots=self.tables[0].slots(rows, positions),
            positions=positions,
            tokens=tokens,
            sources=sources,
            hidden=target.hidden,
            aux_hidden=target.aux_hidden,
            sampling_rows=target.rows,
            last_pairs=layout["accept_firsts"] + accepted.lens - 1,
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


def _check_proposed(trees: Trees, layout: StepLayout) -> None:
    """Refuse trees that are not what a drafter was asked for: read as they are, they would change the output."""
    shape, asked = tuple(trees.tokens.shape), (len(layout.drafting), layout.tree_width)
    if shape != asked:
        raise InvariantError(f"the drafter proposed trees of {shape} (rounds, nodes), asked for were {asked}")
    if layout.shape.topk == 1 and not trees.are_chains:
        raise InvariantError("the drafter proposed trees, and chains were asked for (--spec-topk 1)")


def _layers(windows: list[int | None], caches: list[KvCache]) -> list[tuple[int, int]]:
    """For each layer its KV cache, and its index among that cache's layers."""
    cache_windows = [cache.table.window for cache in caches]
    return [(cache_windows.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)]
