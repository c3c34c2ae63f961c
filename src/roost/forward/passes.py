"""Forward passes: the device's part of a step, from rows to results, without a look at the host's numbers.

`draft` drafts, `forward` runs the target, `logits` are those of its nodes; `accept_and_extend` takes the drawn
tokens, accepts, moves KV, lets the drafter take over and updates the row state: lengths and last tokens by row, which
the next step needs before the host knows them. Shapes depend on the layout alone, so all can be captured as CUDA
graphs; where the number of rounds is data, `draft_by_row` and `forward_drafted` are apart. Rows of a pass that
breaks start anew, with a chunk. Called by the runner and graphs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, PageTable, book_of
from roost.attention.protocol import attend_through, make_attention
from roost.attention.recurrent_states import RecurrentStates
from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.drafters.accept import Accepted, accept
from roost.drafters.lookup import make_lookup
from roost.drafters.make import Parts, make_drafter
from roost.drafters.protocol import Drafter, Pairs
from roost.drafters.tree import RowTrees, Trees, chains
from roost.errors import InvariantError
from roost.forward.layout import PAIRS, ROOTS, TOKENS, StepLayout
from roost.forward.lengths import Lengths
from roost.layers.convolution import NOTHING_THERE
from roost.layers.gumbel import RowDraws
from roost.layers.ops import on_host
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
    node_tokens: Tensor  # [num_nodes] the token of the batch that each node is
    hidden: Tensor  # [num_tokens, hidden_size]
    aux_hidden: tuple[Tensor, ...]
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
            node_tokens=self.node_tokens[:nodes],
            hidden=self.hidden[:tokens],
            aux_hidden=tuple(each[:tokens] for each in self.aux_hidden),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branches:
    """Tokens of a flat batch as nodes of trees, beside others that follow one another."""

    trees: Trees
    tree_of: Tensor  # [num_tokens] the token's tree; -1: none
    node: Tensor  # [num_tokens] its number there; of no meaning without one
    roots: Tensor  # [num_tokens] row position of its root

    def before(self, places: Tensor, back: int) -> Tensor:
        """The row position of the token so many before each: an ancestor, or in the text in front of the tree."""
        tree = self.tree_of.clamp(min=0)
        node = self.node.clamp(max=self.trees.width - 1)
        depth = self.trees.depths[tree, node]
        for _ in range(back):
            node = self.trees.parents[tree, node].clamp(min=0)
        in_tree = self.roots + torch.where(depth >= back, node, depth - back)
        return torch.where(self.tree_of >= 0, in_tree, places - back)


class Passes:
    """A model, its KV, its drafter if there is one, and the row state."""

    def __init__(self, model: Model, resolved: Resolved, device: Device, head: Head | None) -> None:
        self.model = model
        self.device = device
        self._is_host = not (device.runs_beside_the_host or resolved.graphs)  # what is captured must be torch's
        self.ops = on_host(model.ops) if self._is_host else model.ops
        self.attention = make_attention(resolved.backend, device)
        self.tables = [PageTable(resolved, book, device) for book in range(len(resolved.books))]
        books, kept = [book_of(kv, resolved.books) for kv in model.kv], resolved.memory.kv_cache_dtype
        self.kv_caches = [  # of the books that the model has layers in; a drafter's layers have their own
            KvCache(table, [kv.kept_as(kept) for kv, own in zip(model.kv, books, strict=True) if own == book])
            for book, table in enumerate(self.tables)
            if book in books
        ]
        # how rows are drawn: the sampler writes it, drafters read it
        self.draws = RowDraws.empty(resolved.num_rows + 1, resolved.vocab_size, device.torch)
        self.lookup = make_lookup(resolved, self.ops.find_drafts, device, is_host=self._is_host)
        self.drafter = self._drafter(resolved, head)
        self.padding_row = resolved.num_rows  # fills up the batches of graphs; all its pages are the null page
        self.lengths = Lengths(resolved.num_rows + 1, device.torch)  # the row state
        self.last_tokens = torch.zeros(resolved.num_rows + 1, dtype=torch.int64, device=device.torch)
        self._row_state = RowState(lengths=self.lengths.device, last_tokens=self.last_tokens)
        self.row_trees = RowTrees(resolved.num_rows + 1, resolved.spec, device.torch)
        self._layers = [(sorted(set(books)).index(book), books[:layer].count(book)) for layer, book in enumerate(books)]
        without_values = [cache for cache in self.kv_caches if not cache.kv.has_values]
        self._conv_cache = next((cache for cache in without_values if cache.kv.recurs is None), None)
        inputs = next((cache for cache in without_values if cache.kv.recurs is not None), None)
        self.states = None
        if inputs is not None and resolved.states is not None:
            self.states = RecurrentStates(inputs, resolved.states.num_pages, resolved.num_rows + 1, device)
        self._target_pass, self._best_pass = model.ops.new_pass(), model.ops.new_pass()

    def draft_and_forward(self, layout: StepLayout) -> TargetOutput:
        """From rows to hidden states; KV is written on the way."""
        return self.forward(layout, self.draft(layout))

    def draft(self, layout: StepLayout, forced: Tensor | None = None) -> Trees | None:
        """What is drafted for a step: a tree for each round that carries drafts; None if none does.

        `forced`: the first of them that are known already, as drafters want them.
        """
        if self.drafter is None or not len(layout.drafting):
            return None
        is_every = self._are_chains(layout)
        rows = layout.rows if is_every else layout.rows[layout["sampling"]][layout["drafting"]]
        rounds = layout.segments(ROOTS, rows, self.lengths.device.index_select(0, rows))
        proposed = self.drafter.propose(rounds, self.last_tokens.index_select(0, rows), layout.tree_width, forced)
        _check_proposed(proposed, layout)
        return proposed

    def forward(self, layout: StepLayout, proposed: Trees | None) -> TargetOutput:
        """Run the target over a step, with what was drafted for it."""
        if self._are_chains(layout):
            return self._forward_chains(layout, proposed)
        rows = layout.rows[layout["sampling"]]
        return self._forward(layout, rows, self._trees(layout, rows, proposed))

    def draft_by_row(self, layout: StepLayout) -> None:
        """Draft for rounds, and keep the trees where `forward_drafted` looks for them."""
        rows = layout.rows[layout["sampling"]]
        self.row_trees.put(rows, self._trees(layout, rows, self.draft(layout)))

    def forward_drafted(self, layout: StepLayout) -> TargetOutput:
        """The same as `draft_and_forward`, for chunks and rounds that were drafted for before."""
        rows = layout.rows[layout["sampling"]]
        trees = self.row_trees.of(rows, self.last_tokens[rows], layout["num_nodes"])
        return self._forward(layout, rows, trees)

    def logits(self, layout: StepLayout, target: TargetOutput) -> Tensor:
        """Logits [num_nodes, vocab_size] of the next token, at every node of a layout's rows."""
        return self.model.logits(_of_nodes(layout, target))

    def best_tokens(self, layout: StepLayout, target: TargetOutput) -> Tensor:
        """The tokens [num_nodes] of the largest logits, at every node of a layout's rows, without the logits."""

        def forward(inputs: Sequence[Tensor]) -> tuple[Tensor]:
            return (self.ops.argmax(self.model.logits(inputs[0])),)

        return self._best_pass.run(None, forward, (_of_nodes(layout, target),), None)[0]

    def accept_and_extend(self, layout: StepLayout, target: TargetOutput, drawn: Tensor) -> tuple[Accepted, Tensor]:
        """Take over the tokens [num_sampling, tree_width] that were drawn after each node.

        What the sampling rows accepted, and what the host is told of every row: [num_rows, 2 + accept_max] tokens
        added, length now, the tokens; and where drafts are looked up, what was last found for it.
        """
        if target.chains is not None:
            accepted, result = self._accept_and_extend_chains(layout, target, target.chains, drawn)
        else:
            accepted, result = self._accept_and_extend_any(layout, target, drawn)
        if self.lookup is not None:
            result = torch.cat([result, self.lookup.last_found(layout.rows)], dim=1)
        return accepted, result

    def _accept_and_extend_any(
        self, layout: StepLayout, target: TargetOutput, drawn: Tensor
    ) -> tuple[Accepted, Tensor]:
        """What the rows of any step accept."""
        trees = target.trees
        accepted = accept(trees, drawn, layout.shape.accept_max_of(trees.width))
        if layout.shape.topk > 1 and trees.width > 1:
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

    def _forward_chains(self, layout: StepLayout, proposed: Trees | None) -> TargetOutput:
        """Run the target, with all index arithmetic in one operation."""
        # the root is the output's last token, whatever a drafter says
        rows, drafts = layout.rows, None if proposed is None else proposed.tokens[:, 1:]
        pages = tuple(cache.table.of_rounds for cache in self.kv_caches)
        inputs = self.ops.chain_inputs(rows, self._row_state, drafts, pages)
        segments = layout.segments(TOKENS, rows, inputs.starts)
        tokens, before = inputs.tokens.flatten(), None
        if self._conv_cache is not None:
            own = rows[:, None].expand(-1, layout.tree_width).flatten()
            before = self._slots_before(self._conv_cache, own, inputs.positions)
        hidden, aux_hidden = self._run_target(tokens, inputs.positions, inputs.slots, segments, before)
        return TargetOutput(
            layout=layout,
            start_positions=inputs.starts,
            rows=rows,
            root_positions=inputs.starts,
            trees=chains(inputs.tokens),
            positions=inputs.positions,
            node_tokens=layout["node_tokens"],
            hidden=hidden,
            aux_hidden=aux_hidden,
            chains=inputs,
        )

    def _accept_and_extend_chains(
        self, layout: StepLayout, target: TargetOutput, inputs: ChainInputs, drawn: Tensor
    ) -> tuple[Accepted, Tensor]:
        """What such rounds accept, again in one operation."""
        pages = self.tables[0].of_rounds
        settled = self.ops.settle_chains(layout.rows, self._row_state, inputs, drawn, self.padding_row, pages)
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

    def _trees(self, layout: StepLayout, rows: Tensor, proposed: Trees | None) -> Trees:
        """The nodes of every sampling row: drafts, or the root alone."""
        roots = self.last_tokens[rows]  # of no meaning for a chunk, whose last token the host knows
        if proposed is None:
            return chains(roots[:, None])
        at, drafted = layout["drafting"], proposed.cut(layout["draft_widths"])
        drafted.tokens[:, 0] = roots[at]  # whatever a drafter says: the root is the output's last token
        if len(layout.drafting) == len(layout.sampling):
            return drafted
        single = roots.new_full((len(roots), layout.tree_width), NOTHING)
        single[:, 0] = roots
        return chains(single).with_rounds(at, drafted)

    def _forward(self, layout: StepLayout, sampling_rows: Tensor, trees: Trees) -> TargetOutput:
        """Run the target over every token of the step."""
        starts = self.lengths.device[layout.rows]
        if "chunk_starts" in layout:  # a chunk's start is the host's to say
            starts = torch.where(layout["chunk_starts"] < 0, starts, layout["chunk_starts"])
        root_positions = starts[layout["sampling"]] + layout["root_index"]
        node_positions = root_positions[layout["node_sampling"]]
        if trees.width > 1:
            node_positions = node_positions + trees.depths.flatten()[layout["node_cells"]]
        # where KV goes; the position of a tree's node is its depth
        first_places = starts[layout["token_segment"]]
        places = first_places + layout["token_index"]
        if layout.is_rounds:
            tokens, positions = trees.tokens.flatten()[layout["node_cells"]], node_positions
        elif not len(trees.tokens):  # no row samples: the host says everything
            tokens, positions = layout["chunk_tokens"], places
        else:
            is_node, cells = layout["token_cells"] >= 0, layout["token_cells"].clamp(min=0)
            tokens = torch.where(is_node, trees.tokens.flatten()[cells], layout["chunk_tokens"])  # the host's to say
            positions = places
            if not trees.are_chains:
                positions = torch.where(is_node, first_places + trees.depths.flatten()[cells], places)
        rows = layout.rows[layout["token_segment"]]
        has_trees = layout.shape.topk > 1 and trees.width > 1
        segments = layout.segments(TOKENS, layout.rows, starts, trees if has_trees else None)
        slots, before = [cache.table.slots(rows, places) for cache in self.kv_caches], None
        if self._conv_cache is not None:
            branches = self._branches(layout, trees, first_places) if has_trees else None
            before = self._slots_before(self._conv_cache, rows, places, branches)
        hidden, aux_hidden = self._run_target(tokens, positions, slots, segments, before)
        return TargetOutput(
            layout=layout,
            start_positions=starts,
            rows=sampling_rows,
            root_positions=root_positions,
            trees=trees,
            positions=node_positions,
            node_tokens=layout["node_tokens"],
            hidden=hidden,
            aux_hidden=aux_hidden,
        )

    def _branches(self, layout: StepLayout, trees: Trees, first_places: Tensor) -> Branches:
        """For each token of a batch with trees, which node of which one it is."""
        segment = layout["token_segment"]
        return Branches(
            trees=trees,
            tree_of=layout["tokens.tree_of"][segment].to(torch.int64),
            node=layout["token_index"],
            roots=first_places,
        )

    def _slots_before(self, cache: KvCache, rows: Tensor, places: Tensor, branches: Branches | None = None) -> Tensor:
        """Where the inputs of short convolutions lie that come before each token, the nearest last."""
        assert cache.table.window is not None
        found = []
        for back in range(cache.table.window - 1, 0, -1):
            at = places - back if branches is None else branches.before(places, back)
            found.append(cache.table.slots(rows, at.clamp(min=0)).masked_fill(at < 0, NOTHING_THERE))
        return torch.stack(found, dim=1)

    def _run_target(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Sequence[Tensor],
        segments: Segments,
        slots_before: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of a flat batch, and what the drafter wants to see; KV goes to the slots of each cache."""
        aux_layers = () if self.drafter is None else self.drafter.aux_layers
        num_caches = len(slots)

        def forward(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            tokens, positions, *rest = inputs
            slots, before = rest[:num_caches], rest[num_caches:]
            places = before[0] if before else None
            attend = attend_through(self.attention, self.kv_caches, slots, segments, self._layers, places, self.states)
            if not aux_layers:
                return (self.model.forward(tokens, positions, attend),)
            hidden, aux_hidden = self.model.forward_with_aux(tokens, positions, attend, aux_layers)
            return hidden, *aux_hidden

        inputs = (tokens, positions, *slots, *(() if slots_before is None else (slots_before,)))
        hidden, *aux_hidden = self._target_pass.run(segments.kind, forward, inputs, segments)
        return hidden, tuple(aux_hidden)

    def _move_accepted(self, target: TargetOutput, accepted: Accepted) -> None:
        """Bring the accepted path's KV to the front; what is not accepted stays where it is."""
        number = torch.arange(accepted.nodes.shape[1], device=accepted.nodes.device)
        roots = target.root_positions[:, None]
        sources = roots + accepted.nodes
        dests = torch.where(number < accepted.lens[:, None], roots + number, sources)
        for cache in self.kv_caches:  # of every book
            slots = [cache.table.slots(target.rows[:, None], each) for each in (sources, dests)]
            if cache.kv.has_values:
                self.attention.copy(cache, *slots)
            else:
                cache.copy(*slots)

    def _pairs(self, layout: StepLayout, target: TargetOutput, accepted: Accepted) -> Pairs:
        """What the drafter takes over: each position with its successor."""
        sources, cells = layout["pair_sources"], layout["pair_cells"]
        if layout.is_rounds:
            tokens = accepted.tokens.clamp(min=0).flatten()[cells]
            sources = sources + accepted.nodes.flatten()[cells]
        elif not len(target.rows):
            tokens = layout["successors"]
        else:
            is_accepted, cells = cells >= 0, cells.clamp(min=0)
            tokens = torch.where(is_accepted, accepted.tokens.clamp(min=0).flatten()[cells], layout["successors"])
            sources = sources + accepted.nodes.flatten()[cells] * is_accepted
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
                ops=self.ops,
                head=head,
                table=self.tables[0],
                attention=self.attention,
                lookup=self.lookup,
                draws=self.draws,
                device=self.device,
                is_host=self._is_host,
            )
        )


def _of_nodes(layout: StepLayout, target: TargetOutput) -> Tensor:
    """Hidden states of the nodes alone."""
    return target.hidden if layout.is_rounds else target.hidden[target.node_tokens]


def _check_proposed(trees: Trees, layout: StepLayout) -> None:
    """Refuse trees that are not what a drafter was asked for: read as they are, they would change the output."""
    shape, asked = tuple(trees.tokens.shape), (len(layout.drafting), layout.tree_width)
    if shape != asked:
        raise InvariantError(f"the drafter proposed trees of {shape} (rounds, nodes), asked for were {asked}")
    if layout.shape.topk == 1 and not trees.are_chains:
        raise InvariantError("the drafter proposed trees, and chains were asked for (--spec-topk 1)")
