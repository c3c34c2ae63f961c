"""Runner: one step, from a plan to its result; plain decoding is a round whose tree is its root.

Owns the forward passes, the sampler and the graphs. Lays a plan out, checks that it stays in what it holds, has tokens
drawn between the two halves of the step, and says what the host learns; nothing waits for the device but the fetched
result. Rounds alone, and steps with chunks, are replayed where a graph holds them. Never decides who runs. Called by
the executor.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roost.config.resolved import Resolved
from roost.device.device import Device, Fetched
from roost.drafters.accept import Accepted
from roost.drafters.lookup import HostLookup
from roost.drafters.tree import Trees, chains
from roost.errors import InvariantError
from roost.forward.layout import StepLayout, chunk_columns, plan_layout
from roost.forward.passes import Passes, TargetOutput
from roost.grammar.matcher import NewMatcher
from roost.grammar.rows import GrammarRows
from roost.graphs.capture import GraphedStep
from roost.graphs.mixed import MixedGraphs
from roost.graphs.rounds import RoundGraphs
from roost.layers.rounds import NOTHING
from roost.models.model import Head, Model
from roost.runner.constraint import Constraint, constraint_of
from roost.runner.shown_tree import TREE_COLUMNS, place_of, shown_tree, tree_columns
from roost.sampling.logprobs import (
    logprob_columns,
    output_logprobs,
    prompt_counts,
    prompt_logprobs,
)
from roost.sampling.sampler import Sampler
from roost.step import LookupColumns, StepPlan, StepResult

Finish = Callable[[], StepResult]  # waits for what a step found
_NO_ROWS = np.empty(0, dtype=np.int64)
_LAYOUTS_MAX = 512  # some kilobytes each; rounds of one width come first, and are made again in no time


class Runner:
    """A model, its KV and its rows; and a drafter, if there is one."""

    def __init__(
        self,
        model: Model,
        resolved: Resolved,
        device: Device,
        head: Head | None = None,
        new_matcher: NewMatcher | None = None,
    ) -> None:
        self._device = device
        self._resolved = resolved
        with device.forward():  # what is made there, is made before the first step reads it
            self.passes = Passes(model, resolved, device, head)
            self._sampler = Sampler(resolved.num_rows, resolved.vocab_size, device, self.passes.ops, self.passes.draws)
            with torch.inference_mode():
                self.mixed_graphs = MixedGraphs(self.passes, resolved, device) if resolved.graphs else None
                self.round_graphs = RoundGraphs(self.passes, resolved, device) if resolved.graphs else None
                if self.mixed_graphs is not None:
                    self.mixed_graphs.warm_up_logits()
        self._grammars = None if new_matcher is None else GrammarRows(new_matcher)
        self._narrows = resolved.widths.narrows and isinstance(self.passes.lookup, HostLookup)
        self._layouts: dict[bytes, StepLayout] = {}  # of steps of rounds alone, by their widths
        self._rows: tuple[np.ndarray, Tensor] | None = None  # the last ones that were sent

    def apply(self, plan: StepPlan) -> None:
        """Bring the page tables up to date with a plan."""
        for table, delta in zip(self.passes.tables, plan.deltas, strict=True):
            table.apply(delta)
        if self.passes.states is not None and plan.states is not None:
            self.passes.states.apply(plan.rows, plan.states)
        for setup in plan.setups:
            self._sampler.set_row(setup)
            if self._grammars is not None:
                self._grammars.begin(setup)
        if plan.setups and self.passes.drafter is not None:
            self.passes.drafter.begin(plan.setups)

    def run(self, plan: StepPlan) -> Finish:
        """Start a step whose page tables are in place."""
        mirror = self.passes.lengths.of_step(plan) if self._resolved.backend.needs_host_lengths else None
        starts = None if mirror is None else mirror.start_positions
        self._check(plan, starts)
        layout = self._layout(self._as_drafted(plan))
        if self.passes.lookup is not None and plan.lookup_widths is not None:
            head_width = plan.head_width if self._narrows else int(plan.query_lens.max())
            self.passes.lookup.want(plan.rows, plan.lookup_widths, head_width)
        constraint = constraint_of(self._grammars, plan, layout)
        graph, layout = self._graph(plan, layout, starts, constraint)
        if graph is not None:
            target, logits, accepted, result = self._replay(graph, plan, layout, starts, constraint)
        else:
            layout = self._sent(plan, layout).at(self._sent_rows(plan.rows), plan.rows, starts)
            forced = None if constraint is None else constraint.forced(layout, self._device)
            proposed = self.passes.draft(layout, forced)
            if proposed is not None and self._narrows:
                layout, proposed = self._narrowed(plan, layout, proposed, starts, forced)
                if constraint is not None:
                    constraint = constraint_of(self._grammars, _as_laid_out(plan, layout), layout)
            if constraint is not None and proposed is not None:
                proposed = constraint.edit(proposed, layout, self._device)
            target = self.passes.forward(layout, proposed)
            logits = self.passes.logits(layout, target) if constraint or self._needs_logits(plan, layout) else None
            drawn = _in_cells(self._sample(plan, layout, target, logits, constraint), layout, target)
            accepted, result = self.passes.accept_and_extend(layout, target, drawn)
        if mirror is not None:
            mirror.advance()
        return self._finish(plan, layout, target, logits, accepted, result, constraint)

    def _graph(
        self, plan: StepPlan, layout: StepLayout, starts: np.ndarray | None, constraint: Constraint | None
    ) -> tuple[GraphedStep | None, StepLayout]:
        """A graph of such a step, with the step in place, if there is one; and the step's layout there."""
        if self.round_graphs is None or self.mixed_graphs is None:
            return None, layout
        has_drafts_to_see = constraint is not None and constraint.has_drafts
        if plan.has_chunks or has_drafts_to_see or not layout.is_even:  # drafting is a graph of its own
            mixed = self.mixed_graphs.find(int(plan.query_lens.sum()))
            if mixed is None or not self._draft(plan, starts):
                return None, layout
            edit = None
            if constraint is not None and constraint.has_drafts:
                edit = constraint.edit_by_row(self.passes.row_trees, layout.tree_width, self._device)
            layout = self.mixed_graphs.load(mixed, plan)  # while the drafts are on their way
            if edit is not None:
                edit()
            return mixed.step, layout
        rounds = self.round_graphs.find(len(plan.rows), layout.tree_width)
        return None if rounds is None else self.round_graphs.load(rounds, plan.rows, layout.tree_width), layout

    def _draft(self, plan: StepPlan, starts: np.ndarray | None) -> bool:
        """Have the rounds of a mixed step drafted for by a graph; False if they should be, and there is none."""
        assert self.round_graphs is not None
        rows, widths = plan.rows[~plan.is_prefill], plan.query_lens[~plan.is_prefill]
        width = int(widths.max(initial=1))  # narrower ones take the first of what is drafted
        if width == 1:
            return True
        rounds = self.round_graphs.find(len(rows), width)
        if rounds is None or rounds.replay_drafts is None:
            return False
        self.round_graphs.load(rounds, rows, width)
        round_starts = None if starts is None else starts[~plan.is_prefill]
        self.passes.attention.before_replay(rounds.drafts_name, rows, np.full_like(widths, width), round_starts)
        rounds.replay_drafts()
        return True

    def _replay(
        self,
        graph: GraphedStep,
        plan: StepPlan,
        layout: StepLayout,
        starts: np.ndarray | None,
        constraint: Constraint | None,
    ) -> tuple[TargetOutput, Tensor | None, Accepted, Tensor]:
        """Run a step by its graph; the results are those of its own rows."""
        self.passes.attention.before_replay(graph.name, plan.rows, layout.query_lens, starts)
        graph.replay_forward()
        forwarded, target = graph.forwarded, graph.forwarded.target.first(layout)
        num_nodes = len(target.positions)
        if forwarded.logits is None:
            assert self.mixed_graphs is not None
            logits = self.mixed_graphs.logits(forwarded.target, num_nodes)
        else:
            logits = forwarded.logits[:num_nodes]
        is_plain = constraint is None and self._sampler.is_plain(plan.rows[layout.sampling].tolist())
        if forwarded.logits is None or not is_plain:
            cells = graph.layout["node_cells"][:num_nodes]
            forwarded.drawn.view(-1)[cells] = self._sample(plan, layout, target, logits, constraint)
        graph.replay_accept()
        return target, logits, graph.accepted.first(len(layout.sampling)), graph.result[: len(plan.rows)]

    def _layout(self, plan: StepPlan) -> StepLayout:
        """Where everything lies, on the host; that of rounds alone is kept for the next ones of such widths."""
        if plan.has_chunks:
            return plan_layout(plan)
        key = plan.query_lens.tobytes()
        if key not in self._layouts:
            if len(self._layouts) == _LAYOUTS_MAX:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[key] = plan_layout(plan)
        return self._layouts[key]

    def _sent(self, plan: StepPlan, layout: StepLayout) -> StepLayout:
        """A layout that the device has, too."""
        if not layout.is_sent:
            has_drafter = self.passes.drafter is not None
            chunks = {} if layout.is_rounds else chunk_columns(plan, layout, has_drafter=has_drafter)
            tile_len_max = self._resolved.backend.tile_len_max
            layout.lay_out(has_drafter=has_drafter, tile_len_max=tile_len_max, chunks=chunks).send(self._device)
        return layout

    def _sent_rows(self, rows: np.ndarray) -> Tensor:
        """The rows of a step on the device, where they mostly are already."""
        if self._rows is None or not np.array_equal(self._rows[0], rows):
            self._rows = rows, self._device.send({"rows": rows})["rows"]
        return self._rows[1]

    def _as_drafted(self, plan: StepPlan) -> StepPlan:
        """The plan as it is laid out for its drafts: where rounds are narrowed afterwards, of one width, as most are.

        Whatever widths were planned, such a layout is one of few that are kept. A grammar looks at the planned ones.
        """
        if not self._narrows or plan.has_chunks or self._grammars is not None:
            return plan
        return replace(plan, query_lens=np.full_like(plan.query_lens, plan.query_lens.max()))

    def _narrowed(
        self, plan: StepPlan, layout: StepLayout, proposed: Trees, starts: np.ndarray | None, forced: Tensor | None
    ) -> tuple[StepLayout, Trees | None]:
        """The step with rounds that verify no more than was drafted for each."""
        assert isinstance(self.passes.lookup, HostLookup)
        nodes = self.passes.lookup.nodes(plan.rows)
        if forced is not None:
            nodes[layout.drafting] = np.maximum(nodes[layout.drafting], 1 + (forced >= 0).sum(dim=1).numpy())
        nodes = np.where(plan.is_prefill, plan.query_lens, np.minimum(nodes, plan.query_lens)).astype(np.int32)
        if np.array_equal(nodes, layout.query_lens):
            return layout, proposed
        plan = replace(plan, query_lens=nodes)
        narrowed = self._sent(plan, self._layout(plan)).at(layout.rows, plan.rows, starts)
        tokens = proposed.tokens
        if not len(narrowed.drafting):
            return narrowed, None
        if len(narrowed.drafting) < len(tokens):
            tokens = tokens[torch.from_numpy(np.flatnonzero(nodes[layout.drafting] > 1))]
        return narrowed, chains(tokens[:, : narrowed.tree_width])

    def _needs_logits(self, plan: StepPlan, layout: StepLayout) -> bool:
        """Whether a step is asked for more than the best token after each node."""
        return plan.num_top_logprobs.max() >= 0 or not self._sampler.is_plain(plan.rows[layout.sampling].tolist())

    def _sample(
        self,
        plan: StepPlan,
        layout: StepLayout,
        target: TargetOutput,
        logits: Tensor | None,
        constraint: Constraint | None,
    ) -> Tensor:
        """The target's token after each node; without logits, the best."""
        if logits is None:
            return self.passes.best_tokens(layout, target)
        if constraint is not None:  # log-probabilities are the model's own
            logits = logits.clone() if plan.num_top_logprobs.max() >= 0 else logits
            constraint.mask(logits, self.passes.ops, self._device)
        if self._sampler.is_plain(plan.rows[layout.sampling].tolist()):
            return self.passes.ops.argmax(logits)
        rows_host = np.repeat(plan.rows[layout.sampling], layout.num_nodes).tolist()
        nodes, of, paths = slice(len(logits)), target.layout, None  # a graph's layout has more of them
        if target.trees.width > 1:
            paths = target.trees.path_tokens.flatten(0, 1)[of["node_cells"][nodes]]
        drawn_at = target.positions + 1  # a token is drawn for the position after its node
        rows = target.rows[of["node_sampling"][nodes]]
        chain_tokens = None
        if target.chains is not None and not self._device.runs_beside_the_host:
            chain_tokens = target.chains.tokens.flatten().tolist()
        return self._sampler.sample(logits, rows, rows_host, drawn_at, paths, chain_tokens)

    def _finish(
        self,
        plan: StepPlan,
        layout: StepLayout,
        target: TargetOutput,
        logits: Tensor | None,
        accepted: Accepted,
        result: Tensor,
        constraint: Constraint | None,
    ) -> Finish:
        """Start bringing the result to the host."""
        tokens = accepted.tokens
        if self._sampler.counts:
            self._sampler.note(target.rows[:, None].expand_as(tokens).flatten(), tokens.flatten())
        wanting, columns = _NO_ROWS, None
        if plan.num_top_logprobs.max() >= 0:
            wanting = np.flatnonzero(plan.num_top_logprobs[layout.sampling] >= 0)  # sampling rows that want logprobs
        if len(wanting):
            assert logits is not None, "log-probabilities are of logits"
            index = self._device.send({"wanting": wanting})["wanting"]
            offsets = target.layout["node_offsets"][: len(layout.sampling)]
            at = (offsets[:, None] + accepted.nodes)[index].flatten()
            chosen = tokens[index].clamp(min=0).flatten()
            columns = output_logprobs(logits, at, chosen, int(plan.num_top_logprobs[layout.sampling].max()))
        prompt = None
        if not layout.is_rounds:
            prompt = prompt_logprobs(_as_laid_out(plan, layout), target.hidden, self.passes.model.logits, self._device)
        shown = place_of(plan, layout)
        tree = tree_columns(shown, target.trees, accepted)
        fetched = self._device.fetch([result, *(columns or ()), *(prompt or ()), *tree])
        if constraint is not None:
            constraint.follow(fetched)
        has_lookups = self.passes.lookup is not None and plan.query_lens[~plan.is_prefill].max(initial=1) > 1
        num_nodes = layout.query_lens if has_lookups else None
        place = int(layout.sampling[shown]) if tree else -1
        own = partial(_result, plan, layout.sampling[wanting], prompt is not None, tokens.shape[1], num_nodes, place)
        return partial(own, fetched, constraint)

    def _check(self, plan: StepPlan, starts: np.ndarray | None) -> None:
        """Refuse a step that would touch a position its plan does not hold, in any book.

        Where the host does not know a round's length, its bound must do.
        """
        known = starts if starts is not None else np.where(plan.is_prefill, plan.start_positions, plan.device_lens_max)
        for table, firsts, ends in zip(self.passes.tables, plan.firsts, plan.ends, strict=True):
            reads, writes = known * 0, known + plan.query_lens
            if table.is_replayed and plan.states is not None:
                reads = plan.states.starts
            elif table.window is not None:
                reads = np.maximum(0, known - table.window + 1)
            elif plan.shape.pair:
                is_drafted = ~plan.is_prefill & (plan.query_lens > 1)
                writes = np.where(is_drafted, np.maximum(writes, known + plan.shape.scratch_len), writes)
            is_wrong = (reads < firsts) | (writes > ends) | (known > plan.device_lens_max) | (writes > table.row_width)
            if np.count_nonzero(is_wrong):
                i = int(is_wrong.argmax())
                raise InvariantError(
                    f"step {plan.step}, row {plan.rows[i]}: reads from {reads[i]}, writes [{known[i]}, {writes[i]}); "
                    f"the plan holds [{firsts[i]}, {ends[i]}) and a length of at most "
                    f"{plan.device_lens_max[i]}, the row {table.row_width} positions"
                )


def _as_laid_out(plan: StepPlan, layout: StepLayout) -> StepPlan:
    """The plan with the widths that its rounds really have, where they were narrowed."""
    return replace(plan, query_lens=layout.query_lens.astype(np.int32))


def _in_cells(tokens: Tensor, layout: StepLayout, target: TargetOutput) -> Tensor:
    """Tokens drawn after each node as [num_sampling, tree_width]."""
    if layout.is_even:
        return tokens.view_as(target.trees.tokens)
    drawn = torch.full_like(target.trees.tokens, NOTHING)
    drawn.view(-1)[layout["node_cells"]] = tokens
    return drawn


def _result(
    plan: StepPlan,
    wanting: np.ndarray,
    has_prompt_logprobs: bool,
    accept_max: int,
    num_nodes: np.ndarray | None,
    shown: int,
    fetched: Fetched,
    constraint: Constraint | None,
) -> StepResult:
    """What the host learns: the one place that waits for the device."""
    result, *columns = fetched()
    accept_lens, lengths, found = result[:, 0], result[:, 1], result[:, 2 : 2 + accept_max]
    tokens = np.zeros((len(result), plan.shape.accept_max), dtype=np.int32)
    tokens[:, : found.shape[1]] = found
    logprobs = prompt = lookups = tree = None
    if shown >= 0:
        tree, columns = shown_tree(shown, int(accept_lens[shown]), columns[-TREE_COLUMNS:]), columns[:-TREE_COLUMNS]
    if num_nodes is not None:  # something was looked up
        found_again = result[:, 2 + accept_max :].astype(np.int32)
        lookups = LookupColumns(
            match_lens=found_again[:, 0],
            is_used=found_again[:, 1] > 0,
            drafts=found_again[:, 2:],
            num_nodes=num_nodes.astype(np.int32),
        )
    if len(wanting):
        counts = np.zeros(len(result), dtype=np.int64)
        counts[wanting] = accept_lens[wanting]
        kept = (np.arange(found.shape[1]) < accept_lens[wanting, None]).flatten()
        logprobs = logprob_columns(counts, [column[kept] for column in columns[:3]])
    if has_prompt_logprobs:
        prompt = logprob_columns(prompt_counts(plan), columns[-3:])
    return StepResult(
        step=plan.step,
        rows=plan.rows,
        epochs=plan.epochs,
        accept_lens=accept_lens.astype(np.int32),
        tokens=tokens,
        lengths=lengths.astype(np.int32),
        logprobs=logprobs,
        prompt_logprobs=prompt,
        num_forced=None if constraint is None else constraint.num_forced(accept_lens),
        lookups=lookups,
        tree=tree,
        errors={} if constraint is None else constraint.errors,
    )
