"""Runner: one step, from a plan to its result; plain decoding is a round whose tree is its root.

Owns the passes, the sampler and the graphs. Lays a plan out, checks that it stays in what it holds, has tokens drawn
between the passes, and says what the host learns; nothing waits for the device but the fetched result. Chunks and
rounds that were captured apart run one after the other. Never decides who runs. Called by the executor.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roost.config.resolved import Resolved
from roost.device.device import Device, Fetched
from roost.errors import InvariantError
from roost.forward.layout import Batch, Layout, chunk_columns
from roost.forward.passes import Ahead, Done, Inputs, Passes
from roost.graphs.capture import Captured
from roost.graphs.chunks import ChunkGraphs
from roost.graphs.rounds import Graphs
from roost.models.model import Head, Model
from roost.sampling.sampler import Sampler
from roost.sampling.step_logprobs import (
    Columns,
    joined_logprobs,
    logprob_columns,
    output_logprobs,
    prompt_counts,
    prompt_logprobs,
)
from roost.step import Bools, StepPlan, StepResult

Finish = Callable[[], StepResult]  # waits for what a step found


class Runner:
    """A model, its KV and its rows; and a drafter, if there is one."""

    def __init__(self, model: Model, resolved: Resolved, device: Device, head: Head | None = None) -> None:
        self._device = device
        self._resolved = resolved
        with device.forward():  # what is made there, is made before the first step reads it
            self.passes = Passes(model, resolved, device, head)
            self._sampler = Sampler(resolved.num_rows, resolved.vocab_size, device, model.ops.argmax)
            with torch.inference_mode():
                self._chunks = ChunkGraphs(self.passes, resolved, device) if resolved.graphs else None
                self._graphs = Graphs(self.passes, resolved, device) if resolved.graphs else None
        self._batches: dict[tuple[int, int], Batch] = {}  # of rounds, by their number and width
        self._layouts: dict[tuple[int, int], Layout] = {}  # the same
        self._rows: tuple[np.ndarray, Tensor] | None = None  # the last ones that were sent

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date with a plan."""
        for table, delta in zip(self.passes.tables, plan.deltas, strict=True):
            table.apply(delta)
        for setup in plan.setups:
            self._sampler.set_row(setup)
            if self.passes.drafter is not None:
                self.passes.drafter.begin(setup)

    def run(self, plan: StepPlan) -> Finish:
        """Start a step whose tables are in place."""
        mirror = self.passes.lengths.of_step(plan) if self._resolved.backend.needs_host_lengths else None
        starts = None if mirror is None else mirror.starts
        self._check(plan, starts)
        if self._is_captured_apart(plan):
            parts = [plan.is_prefill, ~plan.is_prefill]
            finishes = [self._start(plan.part(part), None if starts is None else starts[part]) for part in parts]
            finish = lambda: _joined(plan, [(part, each()) for part, each in zip(parts, finishes, strict=True)])  # noqa: E731
        else:
            finish = self._start(plan, starts)
        if mirror is not None:
            mirror.advance()
        return finish

    def _start(self, plan: StepPlan, starts: np.ndarray | None) -> Finish:
        """Start a step, or a part of one."""
        batch = self._batch(plan)
        captured = self._captured(plan, batch)
        if captured is not None:
            ahead, done = self._replay(captured, plan, batch, starts)
        else:
            layout, rows = self._layout(plan, batch), self._sent_rows(plan.rows)
            inputs = Inputs(layout=layout, rows=rows, rows_host=plan.rows, starts_host=starts)
            ahead = self.passes.ahead(inputs)
            done = self.passes.behind(inputs, ahead, self._sample(plan, batch, ahead))
        return self._finish(plan, batch, ahead, done)

    def _is_captured_apart(self, plan: StepPlan) -> bool:
        """Whether chunks and rounds of a mixed step can be replayed one after the other."""
        if self._graphs is None or self._chunks is None or plan.is_prefill.all() or not plan.is_prefill.any():
            return False
        widths = plan.widths[~plan.is_prefill]
        is_even = bool((widths == widths[0]).all())
        return (
            is_even
            and self._graphs.find(len(widths), int(widths[0])) is not None
            and self._chunks.find(len(plan.rows) - len(widths), len(plan.tokens)) is not None
        )

    def _captured(self, plan: StepPlan, batch: Batch) -> Captured | None:
        """A captured step like this one, with its rows in place; None if there is none."""
        if self._graphs is None or self._chunks is None:
            return None
        if plan.is_prefill.all():
            chunks = self._chunks.find(len(plan.rows), len(plan.tokens))
            return None if chunks is None else self._chunks.load(chunks, plan, batch)
        rounds = self._graphs.find(len(plan.rows), batch.tree_width) if batch.is_even else None
        return None if rounds is None else self._graphs.load(rounds, plan.rows, batch.tree_width)

    def _replay(
        self, captured: Captured, plan: StepPlan, batch: Batch, starts: np.ndarray | None
    ) -> tuple[Ahead, Done]:
        """Run a step that was captured."""
        self.passes.attention.before_replay(captured.name, plan.rows, batch.widths, starts)
        captured.run_ahead()
        ahead = captured.ahead.first(batch)
        if not self._sampler.is_plain(plan.rows[batch.sampling].tolist()):
            captured.sampled[: len(ahead.positions)] = self._sample(plan, batch, ahead)
        captured.run_behind()
        return ahead, captured.done.first(batch)

    def _batch(self, plan: StepPlan) -> Batch:
        """The layout on the host; that of rounds of one width is kept."""
        key = (len(plan.rows), int(plan.widths[0]))
        if plan.is_prefill.any() or not (plan.widths == key[1]).all():
            return Batch.of_plan(plan)
        if key not in self._batches:
            self._batches[key] = Batch.of_plan(plan)
        return self._batches[key]

    def _layout(self, plan: StepPlan, batch: Batch) -> Layout:
        """Where everything lies; that of rounds of one width is kept."""
        pairs, tile_len = self.passes.drafter is not None, self._resolved.backend.tile_len_max
        if not batch.is_even:
            chunks = {} if batch.is_rounds else chunk_columns(plan, batch, pairs=pairs)
            return Layout(batch, self._device, pairs=pairs, chunks=chunks, tile_len_max=tile_len)
        key = (len(plan.rows), batch.tree_width)
        if key not in self._layouts:
            self._layouts[key] = Layout(batch, self._device, pairs=pairs, chunks={}, tile_len_max=tile_len)
        return self._layouts[key]

    def _sent_rows(self, rows: np.ndarray) -> Tensor:
        """The rows of a step on the device, where they mostly are already."""
        if self._rows is None or not np.array_equal(self._rows[0], rows):
            self._rows = rows, self._device.send({"rows": rows})["rows"]
        return self._rows[1]

    def _sample(self, plan: StepPlan, batch: Batch, ahead: Ahead) -> Tensor:
        """The target's token after each node."""
        rows_host = np.repeat(plan.rows[batch.sampling], batch.num_nodes).tolist()
        paths = ahead.trees.path_tokens.flatten(0, 1)[ahead.node_cells] if ahead.trees.width > 1 else None
        drawn_at = ahead.positions + 1  # a token is drawn for the place after its node
        return self._sampler.sample(ahead.logits, ahead.rows[ahead.node_roots], rows_host, drawn_at, paths)

    def _finish(self, plan: StepPlan, batch: Batch, ahead: Ahead, done: Done) -> Finish:
        """Start bringing the result to the host."""
        accepted, tokens = done.accepted, done.accepted.tokens
        if self._sampler.counts:
            self._sampler.note(ahead.rows[:, None].expand_as(tokens).flatten(), tokens.flatten())
        wanting = np.flatnonzero(plan.num_top_logprobs[batch.sampling] >= 0)  # sampling rows that want logprobs
        columns: Columns | None = None
        if len(wanting):
            index = self._device.send({"wanting": wanting})["wanting"]
            at = (ahead.node_offsets[:, None] + accepted.nodes)[index].flatten()
            chosen = tokens[index].clamp(min=0).flatten()
            columns = output_logprobs(ahead.logits, at, chosen, int(plan.num_top_logprobs[batch.sampling].max()))
        prompt = prompt_logprobs(plan, ahead.hidden, self.passes.model.logits, self._device)
        fetched = self._device.fetch([done.result, *(columns or ()), *(prompt or ())])
        return lambda: _result(plan, batch.sampling[wanting], prompt is not None, fetched)

    def _check(self, plan: StepPlan, starts: np.ndarray | None) -> None:
        """Refuse a step that would touch a position its plan does not hold, in any book.

        Where the host does not know a round's length, its bound must do.
        """
        known = starts if starts is not None else np.where(plan.is_prefill, plan.starts, plan.his)
        for table, firsts, ends in zip(self.passes.tables, plan.firsts, plan.ends, strict=True):
            reads = np.zeros_like(known) if table.window is None else np.maximum(0, known - table.window + 1)
            writes = known + plan.widths
            if plan.shape.pair and table.window is None:
                at = np.flatnonzero(~plan.is_prefill & (plan.widths > 1))
                writes[at] = np.maximum(writes[at], self._branch_ends(plan, known[at], is_bound=starts is None))
            is_wrong = (reads < firsts) | (writes > ends) | (known > plan.his) | (writes > table.row_width)
            if is_wrong.any():
                i = int(is_wrong.argmax())
                raise InvariantError(
                    f"step {plan.step}, row {plan.rows[i]}: reads from {reads[i]}, writes [{known[i]}, {writes[i]}); "
                    f"the plan holds [{firsts[i]}, {ends[i]}) and a length of at most {plan.his[i]}, the row "
                    f"{table.row_width} positions"
                )

    def _branch_ends(self, plan: StepPlan, starts: np.ndarray, *, is_bound: bool) -> np.ndarray:
        """Where the branches of rounds end, or can end at most."""
        size = self._resolved.page_size
        if is_bound:
            return starts + plan.shape.alloc_len_per_decode(size)
        return np.array([plan.shape.branches(start, size).end for start in starts.tolist()], dtype=starts.dtype)


def _joined(plan: StepPlan, parts: list[tuple[Bools, StepResult]]) -> StepResult:
    """The result of a step that ran in parts."""
    accept_lens, lengths = np.zeros(len(plan.rows), dtype=np.int32), np.zeros(len(plan.rows), dtype=np.int32)
    tokens = np.zeros((len(plan.rows), plan.shape.accept_max), dtype=np.int32)
    for part, result in parts:
        accept_lens[part], lengths[part] = result.accept_lens, result.lengths
        tokens[part] = result.tokens
    return StepResult(
        step=plan.step,
        rows=plan.rows,
        epochs=plan.epochs,
        accept_lens=accept_lens,
        tokens=tokens,
        lengths=lengths,
        logprobs=joined_logprobs([(part, result.logprobs) for part, result in parts]),
        prompt_logprobs=joined_logprobs([(part, result.prompt_logprobs) for part, result in parts]),
    )


def _result(plan: StepPlan, wanting: np.ndarray, has_prompt_logprobs: bool, fetched: Fetched) -> StepResult:
    """What the host learns: the one place that waits for the device."""
    result, *columns = fetched()
    accept_lens, lengths, found = result[:, 0], result[:, 1], result[:, 2:]
    tokens = np.zeros((len(result), plan.shape.accept_max), dtype=np.int32)
    tokens[:, : found.shape[1]] = found
    logprobs = prompt = None
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
    )
