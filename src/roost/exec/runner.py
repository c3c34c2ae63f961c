"""Runner: one plain step on the device, from a plan to its result.

Owns the pools and the relay: the values by row that the next step needs before the host knows them. A step that
breaks leaves the relay as it was. Never decides who runs. Called by the executor, on its worker thread.
"""

import numpy as np
import torch
from torch import Tensor

from roost.config import Resolved
from roost.errors import InvariantError
from roost.exec.lengths import Lengths
from roost.exec.logprobs import log_probabilities
from roost.exec.pool import Pool
from roost.exec.sampler import Sampler
from roost.layers.attention import Span, first_read, paged_attention, plan_reads
from roost.models.model import Model
from roost.step import Ints, Scores, StepPlan, StepResult

_SCORED_MAX = 256  # prompt positions whose scores over the vocabulary exist at one time


class Runner:
    """A model, its KV and its rows."""

    def __init__(self, model: Model, resolved: Resolved, device: torch.device) -> None:
        self.model = model
        self._device = device
        self.pools = [Pool(resolved, book, model.kv, device) for book in range(len(resolved.books))]
        self._places = _places(model.kv.windows, self.pools)
        self._sampler = Sampler(resolved.num_rows, resolved.vocab_size, device)
        self._lengths = Lengths(resolved.num_rows, device)  # the relay, by row
        self._last_tokens = torch.zeros(resolved.num_rows, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date with a plan."""
        for pool, delta in zip(self.pools, plan.deltas, strict=True):
            pool.apply(delta)
        for setup in plan.setups:
            self._sampler.set_row(setup)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step whose tables are in place."""
        with torch.inference_mode():
            lengths = self._lengths.of_step(plan)
            self._check(plan, lengths.starts)
            hidden = self._forward(plan, lengths.starts)
            prompt_scores = self._prompt_scores(plan, lengths.starts, hidden)
            sampling = np.flatnonzero(plan.is_final | ~plan.is_prefill)
            lasts = np.cumsum(plan.widths)[sampling] - 1  # flat index of each sampling row's last token
            logits = self.model.logits(hidden[self._tensor(lasts)])
            rows, ends = plan.rows[sampling], lengths.ends[sampling]
            device_rows = self._tensor(rows).to(torch.int64)
            sampled = self._sampler.sample(logits, device_rows, rows.tolist(), self._tensor(ends))
            scores = _scores(logits, sampled, plan.tops[sampling], _spread(sampling, len(plan.rows)))
            lengths.advance()
            self._last_tokens[device_rows] = sampled
            self._sampler.note(device_rows, sampled)
        accept_lens = np.zeros(len(plan.rows), dtype=np.int32)
        accept_lens[sampling] = 1
        tokens = np.zeros((len(plan.rows), 1), dtype=np.int32)
        tokens[sampling, 0] = sampled.cpu().numpy()
        return StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=accept_lens,
            tokens=tokens,
            lengths=lengths.ends.astype(np.int32),
            scores=scores,
            prompt_scores=prompt_scores,
        )

    def _prompt_scores(self, plan: StepPlan, starts: Ints, hidden: Tensor) -> Scores | None:
        """What the model gave the prompt's own tokens, where a row asked for it."""
        counts = np.where(plan.score_froms < 0, 0, plan.score_ends - plan.score_froms)
        if not counts.any():
            return None
        scored = np.flatnonzero(counts).tolist()
        offsets = np.cumsum(plan.widths) - plan.widths
        index = np.concatenate([np.arange(plan.score_froms[i], plan.score_ends[i]) - starts[i] for i in scored])
        index += np.repeat(offsets[scored], counts[scored])
        followers = np.concatenate([_followers(plan, i) for i in scored])
        tops = np.repeat(plan.tops[scored].clip(min=0), counts[scored])
        pieces = [
            _score_columns(
                self.model.logits(hidden[self._tensor(index[part])]), self._tensor(followers[part]), tops.max()
            )
            for part in _parts(len(index))
        ]
        logprobs, top_ids, top_logprobs = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return Scores(offsets=_offsets_of(counts), logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)

    def _forward(self, plan: StepPlan, starts: Ints) -> Tensor:
        """Hidden states of every token of the step; their KV is written on the way, before it is read."""
        widths, offsets = plan.widths, np.cumsum(plan.widths) - plan.widths
        token_rows = self._tensor(np.repeat(plan.rows, widths))
        positions = self._tensor(np.arange(widths.sum()) + np.repeat(starts - offsets, widths))
        tokens = self._last_tokens[token_rows]  # right for rounds; the chunks' are known to the host
        tokens[self._tensor(np.repeat(plan.is_prefill, widths))] = self._tensor(plan.tokens).to(tokens.dtype)
        slots = [pool.slots(token_rows, positions) for pool in self.pools]
        columns = np.stack([plan.rows, offsets, widths, starts], axis=1).tolist()
        spans = [Span(row=row, offset=offset, width=width, start=start) for row, offset, width, start in columns]
        reads = [plan_reads(pool.table, spans, page_size=pool.page_size, window=pool.window) for pool in self.pools]
        scale = self.model.kv.scale

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            book, index = self._places[layer]
            pool = self.pools[book]
            pool.write(index, slots[book], key, value)
            return paged_attention(query, pool.keys[index], pool.values[index], reads[book], scale=scale)

        return self.model.forward(tokens, positions, attend)

    def _check(self, plan: StepPlan, starts: Ints) -> None:
        """Refuse a step that would touch a position its plan does not hold, in any book."""
        for i, (start, width) in enumerate(zip(starts.tolist(), plan.widths.tolist(), strict=True)):
            for pool, firsts, ends in zip(self.pools, plan.firsts, plan.ends, strict=True):
                first, end = first_read(start, pool.window), start + width
                if not (firsts[i] <= first and end <= ends[i] and start <= plan.his[i]):
                    raise InvariantError(
                        f"step {plan.step}, row {plan.rows[i]}: reads from {first}, writes [{start}, {end}); "
                        f"the plan holds [{firsts[i]}, {ends[i]}) and a length of at most {plan.his[i]}"
                    )

    def _tensor(self, column: np.ndarray) -> Tensor:
        return torch.tensor(column, device=self._device)


def _followers(plan: StepPlan, row: int) -> Ints:
    """The tokens after the scored positions of a chunk."""
    chunk = plan.tokens[plan.token_offsets[row] : plan.token_offsets[row + 1]]
    following = np.append(chunk[1:], plan.next_tokens[row])  # a scored position is never the prompt's last
    start = plan.starts[row]
    return following[plan.score_froms[row] - start : plan.score_ends[row] - start]


def _parts(length: int) -> list[slice]:
    """Pieces that keep the scores of a long prompt from filling the memory."""
    return [slice(first, first + _SCORED_MAX) for first in range(0, length, _SCORED_MAX)]


def _scores(logits: Tensor, tokens: Tensor, tops: Ints, offsets: Ints) -> Scores | None:
    """Scores of the sampled tokens, if any row wants them."""
    if len(tops) == 0 or tops.max() < 0:
        return None
    logprobs, top_ids, top_logprobs = _score_columns(logits, tokens, tops.max())
    return Scores(offsets=offsets, logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def _score_columns(logits: Tensor, tokens: Tensor, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = log_probabilities(logits, tokens, min(int(top), logits.shape[-1]))
    logprobs, top_ids, top_logprobs = (column.cpu().numpy() for column in columns)
    return logprobs, top_ids.astype(np.int32), top_logprobs


def _spread(sampling: np.ndarray, num_rows: int) -> Ints:
    """Offsets of one entry for each row that samples."""
    counts = np.zeros(num_rows, dtype=np.int32)
    counts[sampling] = 1
    return _offsets_of(counts)


def _offsets_of(counts: np.ndarray) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _places(windows: tuple[int | None, ...], pools: list[Pool]) -> list[tuple[int, int]]:
    """For each layer its book, and its index among that book's layers."""
    books = [pool.window for pool in pools]
    return [(books.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)]
