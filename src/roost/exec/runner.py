"""Runner: one step on the device, from a plan to its result; plain decoding is a round whose tree is its root.

Owns the pools and the relay: the values by row that the next step needs before the host knows them. A step that
breaks leaves the relay as it was. Never decides who runs. Called by the executor, on its worker thread.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.config import Resolved
from roost.errors import InvariantError
from roost.exec.batch import Batch, ramps
from roost.exec.lengths import Lengths
from roost.exec.pool import Pool, Table
from roost.exec.sampler import Sampler
from roost.exec.scores import offsets_of, output_scores, prompt_scores
from roost.layers.attention import Span, Tree, first_read, paged_attention, plan_reads
from roost.models.model import Head, Model
from roost.spec.accept import Accepted, accept
from roost.spec.drafter import Drafter, Pairs, Rounds
from roost.spec.eagle import EagleDrafter
from roost.spec.ngram import NgramDrafter
from roost.spec.tree import NOTHING, Trees, chains
from roost.step import Scores, StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Nodes:
    """The nodes of every sampling row, one after the other, on the device."""

    tokens: Tensor  # [num_nodes] the token of the batch that each is
    cells: Tensor  # [num_nodes] where it stands in the trees, flattened
    positions: Tensor  # [num_nodes]


class Runner:
    """A model, its KV and its rows; and a drafter, if there is one."""

    def __init__(self, model: Model, resolved: Resolved, device: torch.device, head: Head | None = None) -> None:
        self.model = model
        self._device = device
        self.tables = [Table(resolved, book, device) for book in range(len(resolved.books))]
        self.pools = [Pool(table, model.kv.windows.count(table.window), model.kv) for table in self.tables]
        self._places = _places(model.kv.windows, self.tables)
        self.drafter = _drafter(resolved, self.tables, head)
        self._sampler = Sampler(resolved.num_rows, resolved.vocab_size, device)
        self._lengths = Lengths(resolved.num_rows, device)  # the relay, by row
        self._roots = torch.zeros(resolved.num_rows, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date with a plan."""
        for table, delta in zip(self.tables, plan.deltas, strict=True):
            table.apply(delta)
        for setup in plan.setups:
            self._sampler.set_row(setup)
            if self.drafter is not None:
                self.drafter.begin(setup)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step whose tables are in place."""
        with torch.inference_mode():
            lengths = self._lengths.of_step(plan)
            batch = Batch(plan, lengths.starts)
            self._check(plan, batch)
            rows = self._tensor(plan.rows[batch.sampling]).to(torch.int64)
            trees = self._trees(plan, batch, rows)
            nodes = self._nodes(batch, trees)
            hidden, captured = self._forward(plan, batch, trees, nodes)
            logits = self.model.logits(hidden[nodes.tokens])
            accepted = self._accept(plan, batch, trees, nodes, logits)
            if plan.shape.topk > 1 and len(batch.drafting):
                self._move_accepted(batch, rows, accepted)
            if self.drafter is not None:
                self.drafter.extend(self._pairs(plan, batch, rows, accepted, hidden, captured))
            result = self._result(
                plan, batch, accepted, logits, prompt_scores(plan, lengths.starts, hidden, self.model.logits)
            )
            ends = self._tensor(batch.ends)
            ends[self._tensor(batch.sampling)] = self._tensor(batch.root_places) + accepted.lens
            lengths.advance(ends)
            self._roots[rows] = accepted.tokens.gather(1, accepted.lens[:, None] - 1).squeeze(1)
            self._sampler.note(rows.repeat_interleave(accepted.tokens.shape[1]), accepted.tokens.flatten())
        return result

    def _trees(self, plan: StepPlan, batch: Batch, rows: Tensor) -> Trees:
        """The nodes of every sampling row: drafts, or the root alone."""
        roots = self._roots[rows]  # of no meaning for a chunk, whose last token the host knows
        if self.drafter is None or not len(batch.drafting):
            return chains(roots[:, None])
        index = np.searchsorted(batch.sampling, batch.drafting)  # which of the sampling rows carry drafts
        at = self._tensor(index)
        starts = batch.starts[batch.drafting]
        rounds = Rounds(
            rows=rows[at],
            rows_host=plan.rows[batch.drafting].tolist(),
            starts=starts.tolist(),
            lengths=self._lengths.device[rows[at]],
            roots=roots[at],
        )
        drafted = self.drafter.propose(rounds).cut(self._tensor(batch.widths[batch.drafting]))
        if len(index) == len(batch.sampling):
            return drafted
        single = roots.new_full((len(roots), plan.shape.tokens), NOTHING)
        single[:, 0] = roots
        return chains(single).with_rounds(at, drafted)

    def _nodes(self, batch: Batch, trees: Trees) -> _Nodes:
        cells = self._tensor(batch.node_cells(trees.width))
        roots = self._tensor(np.repeat(batch.root_places, batch.num_nodes))
        positions = roots + trees.depths.flatten()[cells] if trees.width > 1 else roots
        return _Nodes(tokens=self._tensor(batch.node_tokens), cells=cells, positions=positions)

    def _forward(self, plan: StepPlan, batch: Batch, trees: Trees, nodes: _Nodes) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden states of every token of the step, and what the drafter wants to see; KV is written on the way."""
        rows, places = self._tensor(batch.token_rows), self._tensor(batch.token_places)
        tokens, positions = torch.zeros_like(rows), places.clone()
        tokens[nodes.tokens] = trees.tokens.flatten()[nodes.cells]
        positions[nodes.tokens] = nodes.positions
        if plan.is_prefill.any():  # a chunk's tokens are the host's to say
            tokens[self._tensor(np.repeat(plan.is_prefill, plan.widths))] = self._tensor(plan.tokens).to(tokens.dtype)
        slots = [table.slots(rows, places) for table in self.tables]
        spans = self._spans(plan, batch, trees)
        reads = [plan_reads(each.pages, spans, page_size=each.page_size, window=each.window) for each in self.tables]
        scale = self.model.kv.scale

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            book, index = self._places[layer]
            pool = self.pools[book]
            pool.write(index, slots[book], key, value)
            return paged_attention(query, pool.keys[index], pool.values[index], reads[book], scale=scale)

        if self.drafter is None or not self.drafter.captures:
            return self.model.forward(tokens, positions, attend), ()
        return self.model.forward_captured(tokens, positions, attend, self.drafter.captures)

    def _spans(self, plan: StepPlan, batch: Batch, trees: Trees) -> list[Span]:
        """The rows' tokens in the flat batch."""
        columns = np.stack([plan.rows, batch.offsets, batch.widths, batch.starts], axis=1).tolist()
        spans = [Span(row=row, offset=offset, width=width, start=start) for row, offset, width, start in columns]
        for i, tree in zip(batch.drafting.tolist(), np.searchsorted(batch.sampling, batch.drafting), strict=True):
            row, offset, width, start = columns[i]
            nodes = Tree(depths=trees.depths[tree, :width], sees=trees.sees[tree, :width, :width])
            spans[i] = Span(row=row, offset=offset, width=width, start=start, tree=nodes)
        return spans

    def _accept(self, plan: StepPlan, batch: Batch, trees: Trees, nodes: _Nodes, logits: Tensor) -> Accepted:
        """The target's token after each node, and the path that agrees with it."""
        rows_host = np.repeat(plan.rows[batch.sampling], batch.num_nodes)
        paths = trees.path_tokens.flatten(0, 1)[nodes.cells] if trees.width > 1 else None
        drawn_at = nodes.positions + 1  # a token is drawn for the place after its node
        sampled = self._sampler.sample(logits, self._tensor(rows_host), rows_host.tolist(), drawn_at, paths)
        targets = torch.full_like(trees.tokens, NOTHING)
        targets.view(-1)[nodes.cells] = sampled
        return accept(trees, targets, plan.shape.accept_max_of(trees.width))

    def _move_accepted(self, batch: Batch, rows: Tensor, accepted: Accepted) -> None:
        """Bring the accepted path's KV to the front; what is not accepted stays where it is."""
        number = torch.arange(accepted.nodes.shape[1], device=self._device)
        roots = self._tensor(batch.root_places)[:, None]
        sources = roots + accepted.nodes
        dests = torch.where(number < accepted.lens[:, None], roots + number, sources)
        for pool in self.pools:
            slots = [pool.table.slots(rows[:, None], each).flatten() for each in (sources, dests)]
            pool.copy(*slots)

    def _pairs(
        self,
        plan: StepPlan,
        batch: Batch,
        rows: Tensor,
        accepted: Accepted,
        hidden: Tensor,
        captured: tuple[Tensor, ...],
    ) -> Pairs:
        """What the drafter takes over: each position with its successor."""
        counts, offsets, is_prefill = batch.num_pairs, batch.pair_offsets, plan.is_prefill
        tokens = self._tensor(batch.chunk_successors)
        sources = self._tensor(np.repeat(batch.offsets, counts) + ramps(counts))  # right for chunks
        # a round's pairs are its accepted path; a final chunk's last pair ends in the token just sampled
        of_sampling = np.where(is_prefill, 1, counts)[batch.sampling]
        firsts = (offsets + np.where(is_prefill, counts - 1, 0))[batch.sampling]
        at = self._tensor(np.repeat(firsts, of_sampling) + ramps(of_sampling))
        width = accepted.tokens.shape[1]
        cells = self._tensor(np.repeat(np.arange(len(firsts)) * width, of_sampling) + ramps(of_sampling))
        tokens[at] = accepted.tokens.clamp(min=0).flatten()[cells]
        roots = self._tensor(np.repeat(batch.root_tokens, of_sampling))
        sources[at] = roots + accepted.nodes.flatten()[cells]
        columns = np.stack([plan.rows, offsets, counts, batch.starts], axis=1).tolist()
        spans = [
            Span(row=row, offset=offset, width=count, start=start, tree=None if chunk else _chain(count, self._device))
            for (row, offset, count, start), chunk in zip(columns, is_prefill.tolist(), strict=True)
        ]
        return Pairs(
            spans=spans,
            rows=self._tensor(np.repeat(plan.rows.astype(np.int64), counts)),
            positions=self._tensor(np.repeat(batch.starts, counts) + ramps(counts)),
            tokens=tokens,
            sources=sources,
            last=hidden,
            captured=captured,
            heads=self._tensor(firsts) + accepted.lens - 1,
            head_rows=rows,
        )

    def _result(
        self, plan: StepPlan, batch: Batch, accepted: Accepted, logits: Tensor, prompt: Scores | None
    ) -> StepResult:
        """What the host learns: the one place that waits for the device."""
        num_rows, sampling = len(plan.rows), batch.sampling
        lens, accepted_tokens, nodes = (each.cpu().numpy() for each in (accepted.lens, accepted.tokens, accepted.nodes))
        accept_lens = np.zeros(num_rows, dtype=np.int32)
        accept_lens[sampling] = lens
        tokens = np.zeros((num_rows, plan.shape.accept_max), dtype=np.int32)
        tokens[sampling, : accepted_tokens.shape[1]] = accepted_tokens
        lengths = batch.ends.astype(np.int32)
        lengths[sampling] = batch.root_places + lens
        kept = np.arange(nodes.shape[1]) < lens[:, None]
        at = (batch.node_offsets[:, None] + nodes)[kept]
        scores = output_scores(logits, at, accepted_tokens[kept], plan.tops[sampling], offsets_of(accept_lens))
        return StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=accept_lens,
            tokens=tokens,
            lengths=lengths,
            scores=scores,
            prompt_scores=prompt,
        )

    def _check(self, plan: StepPlan, batch: Batch) -> None:
        """Refuse a step that would touch a position its plan does not hold, in any book."""
        drafting = set(batch.drafting.tolist())
        for i, (start, written) in enumerate(zip(batch.starts.tolist(), batch.ends.tolist(), strict=True)):
            for table, firsts, ends in zip(self.tables, plan.firsts, plan.ends, strict=True):
                first, end = first_read(start, table.window), written
                if plan.shape.pair and table.window is None and i in drafting:
                    end = max(end, plan.shape.branches(start, table.page_size).end)
                if not (firsts[i] <= first and end <= ends[i] and start <= plan.his[i]):
                    raise InvariantError(
                        f"step {plan.step}, row {plan.rows[i]}: reads from {first}, writes [{start}, {end}); "
                        f"the plan holds [{firsts[i]}, {ends[i]}) and a length of at most {plan.his[i]}"
                    )

    def _tensor(self, column: np.ndarray) -> Tensor:
        return torch.tensor(column, device=self._device)


def _drafter(resolved: Resolved, tables: list[Table], head: Head | None) -> Drafter | None:
    """The drafter of a configuration."""
    if resolved.spec.pair:
        if head is None:
            raise InvariantError("a drafter with KV of its own needs a head")
        return EagleDrafter(head, resolved.spec, tables[0])  # the full book is the first
    if resolved.spec.reads_history:
        return NgramDrafter(resolved.spec, resolved.num_rows, resolved.row_width, tables[0].pages.device)
    return None


def _chain(width: int, device: torch.device) -> Tree:
    """A round's pairs: one after the other, read like a tree so that rounds are read together."""
    number = torch.arange(width, device=device)
    return Tree(depths=number, sees=number <= number[:, None])


def _places(windows: tuple[int | None, ...], tables: list[Table]) -> list[tuple[int, int]]:
    """For each layer its book, and its index among that book's layers."""
    books = [table.window for table in tables]
    return [(books.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)]
