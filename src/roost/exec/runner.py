"""Runner: one plain step on the device, from a plan to its result.

Owns the pools and the relay: the values by row that the next step needs before the host knows them. A step that
breaks leaves the relay as it was. Never decides who runs. Called by the executor, on its worker thread.
"""

import numpy as np
import torch
from torch import Tensor

from roost.config import Resolved
from roost.errors import InvariantError
from roost.exec.pool import Pool
from roost.layers.attention import Span, first_read, paged_attention
from roost.models.model import Model
from roost.step import Ints, StepPlan, StepResult


class Runner:
    """A model, its KV and its rows."""

    def __init__(self, model: Model, resolved: Resolved, device: torch.device) -> None:
        self._model = model
        self._device = device
        self.pools = [Pool(resolved, book, model.kv, device) for book in range(len(resolved.books))]
        self._places = _places(model.kv.windows, self.pools)
        self._lengths = torch.zeros(resolved.num_rows, dtype=torch.int64, device=device)  # the relay, by row
        self._last_tokens = torch.zeros(resolved.num_rows, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Bring the tables up to date with a plan."""
        for pool, delta in zip(self.pools, plan.deltas, strict=True):
            pool.apply(delta)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step whose tables are in place."""
        with torch.inference_mode():
            rows = self._tensor(plan.rows)
            starts = np.where(plan.is_prefill, plan.starts, self._lengths[rows].cpu().numpy())
            self._check(plan, starts)
            hidden = self._forward(plan, starts)
            sampling = np.flatnonzero(plan.is_final | ~plan.is_prefill)
            lasts = np.cumsum(plan.widths)[sampling] - 1  # flat index of each sampling row's last token
            sampled = self._model.logits(hidden[self._tensor(lasts)]).argmax(dim=-1)  # ties: the lowest id
            lengths = starts + plan.widths
            self._lengths[rows] = self._tensor(lengths)
            self._last_tokens[rows[self._tensor(sampling)]] = sampled
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
            lengths=lengths.astype(np.int32),
        )

    def _forward(self, plan: StepPlan, starts: Ints) -> Tensor:
        """Hidden states of every token of the step; their KV is written on the way, before it is read."""
        widths, offsets = plan.widths, np.cumsum(plan.widths) - plan.widths
        token_rows = self._tensor(np.repeat(plan.rows, widths))
        positions = self._tensor(np.arange(widths.sum()) + np.repeat(starts - offsets, widths))
        tokens = self._last_tokens[token_rows]  # right for rounds; the chunks' are known to the host
        tokens[self._tensor(np.repeat(plan.is_prefill, widths))] = self._tensor(plan.tokens).to(tokens.dtype)
        slots = [pool.slots(token_rows, positions) for pool in self.pools]
        spans = [
            Span(row=row, offset=offset, width=width, start=start)
            for row, offset, width, start in np.stack([plan.rows, offsets, widths, starts], axis=1).tolist()
        ]

        scale = self._model.kv.scale

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            book, index = self._places[layer]
            pool = self.pools[book]
            pool.write(index, slots[book], key, value)
            return paged_attention(
                query,
                pool.keys[index],
                pool.values[index],
                pool.table,
                spans,
                page_size=pool.page_size,
                window=pool.window,
                scale=scale,
            )

        return self._model.forward(tokens, positions, attend)

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


def _places(windows: tuple[int | None, ...], pools: list[Pool]) -> list[tuple[int, int]]:
    """For each layer its book, and its index among that book's layers."""
    books = [pool.window for pool in pools]
    return [(books.index(window), windows[:layer].count(window)) for layer, window in enumerate(windows)]
