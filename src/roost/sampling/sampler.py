"""Sampler: the sampling options and token counts of every row, and the one way from logits to tokens.

In this order: logit bias; repetition penalty (prompt and output); presence and frequency penalty (output); no stop id
below `min_len`; temperature; top-k; top-p of what top-k left; min-p of the largest; a draw with Gumbel noise that is a
hash of (seed, position, token).
Greedy rows take the best logit before temperature. A row's token depends on nothing outside its row. Paths are chosen
from a host mirror, so there is no host sync. Never keeps a token by itself. Called by the runner, on its thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Device
from roost.layers.gumbel import RowDraws
from roost.layers.host_gumbel import draw_key
from roost.layers.ops import TORCH_OPS, Ops
from roost.layers.rounds import NOTHING
from roost.sampling import draw, host_draw
from roost.sampling.params import SamplingParams
from roost.step import RowSetup

# The numbers of a row: a parameter that is one is there by its name, whoever uses it.
_REALS = tuple(each.name for each in fields(SamplingParams) if each.type is float)
_WHOLES = (*(each.name for each in fields(SamplingParams) if each.type is int), "min_len")
CHUNK_ELEMENTS_MAX = 2**24  # logits worked on at a time: a few tensors of 8 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """What the host knows of a row: enough to choose the work."""

    is_plain: bool  # the argmax of the logits, nothing else
    is_greedy: bool
    num_biases: int
    penalises: bool
    holds_stops: bool  # its first tokens may not be a stop id
    top_k: int  # vocab_size: all
    has_top_k: bool
    has_top_p: bool
    has_min_p: bool

    @property
    def truncates(self) -> bool:
        """Whether some tokens are left out of the draw."""
        return self.has_min_p or self.has_top_p or self.has_top_k

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.num_biases > 0 or self.penalises or self.holds_stops


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    """What is drawn: for each entry its row, the token's position and the path of tokens before it."""

    rows: Tensor  # [n]
    positions: Tensor  # [n]
    extra: Tensor | None  # [n, path_len], padded with -1

    def pick(self, index: Tensor | slice) -> "_Entries":
        extra = None if self.extra is None else self.extra[index]
        return _Entries(rows=self.rows[index], positions=self.positions[index], extra=extra)


_Change = Callable[[Tensor, _Entries], Tensor]


class Sampler:
    """Options and counts by row."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        device: Device,
        ops: Ops = TORCH_OPS,
        draws: RowDraws | None = None,
    ) -> None:
        self._ops = ops
        assert 0 < vocab_size <= draw.VOCAB_SIZE_MAX, vocab_size
        self._vocab_size = vocab_size
        self._device = device
        self._host_draw = host_draw.HostDraw(vocab_size) if device.torch.type == "cpu" else None
        self._paths: list[_Path | None] = [None] * num_rows  # host mirror; None: not set yet
        self._reals = torch.zeros(len(_REALS), num_rows, dtype=torch.float64, device=device.torch)
        self._wholes = torch.zeros(len(_WHOLES), num_rows, dtype=torch.int64, device=device.torch)
        # what a draw reads of a row, where drafters read it too
        self._draws = RowDraws.empty(num_rows + 1, vocab_size, device.torch) if draws is None else draws
        # the numbers of every row by parameter: [num_rows] each, views of the two tables
        self.numbers = dict(zip((*_REALS, *_WHOLES), (*self._reals, *self._wholes), strict=True))
        self._stop_ids = torch.zeros(num_rows, 0, dtype=torch.int64, device=device.torch)  # [num_rows, widest so far]
        self._in_prompt: Tensor | None = None  # [num_rows, vocab] bool, once a row penalises
        self._output_counts: Tensor | None = None  # [num_rows, vocab] int32

    @torch.inference_mode()
    def set_row(self, setup: RowSetup) -> None:
        """Begin a row: forget whatever it was before."""
        sampling, row = setup.sampling, setup.row
        has_top_k = 0 < sampling.top_k < self._vocab_size
        stop_ids = [token_id for token_id in setup.stop_ids if 0 <= token_id < self._vocab_size]
        holds_stops = bool(stop_ids) and setup.min_len > setup.prompt_len
        path = _Path(
            is_plain=sampling.plain_greedy and not holds_stops,
            is_greedy=sampling.greedy,
            num_biases=len(sampling.logit_bias),
            penalises=sampling.penalises,
            holds_stops=holds_stops,
            top_k=sampling.top_k if has_top_k else self._vocab_size,
            has_top_k=has_top_k,
            has_top_p=sampling.top_p < 1,
            has_min_p=sampling.min_p > 0,
        )
        self._paths[row] = path
        reals = [getattr(sampling, name) for name in _REALS]
        self._reals[:, row] = self._device.put(np.array(reals, dtype=np.float64))
        own = {"top_k": path.top_k, "min_len": setup.min_len}
        wholes = [own[name] if name in own else getattr(sampling, name) for name in _WHOLES]
        self._wholes[:, row] = self._device.put(np.array(wholes, dtype=np.int64))
        self._set_draws(row, sampling, path)
        if holds_stops:
            self._stop_ids = self._with_row(self._stop_ids, row, np.array(stop_ids, dtype=np.int64), padding=-1)
        if path.penalises:
            self._count(setup)

    @property
    def counts(self) -> bool:
        """Whether tokens are counted: some row has asked for a penalty."""
        return self._output_counts is not None

    def is_plain(self, rows: Sequence[int]) -> bool:
        """Whether the best token is all that these rows want."""
        return all(self._path(row).is_plain for row in rows)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        rows_host: Sequence[int],
        positions: Tensor,
        extra: Tensor | None = None,
        chain_tokens: Sequence[int] | None = None,
    ) -> Tensor:
        """The tokens [n] that will stand at `positions` [n] of `rows` [n], from logits [n, vocab].

        `rows_host` repeats `rows`; a row may come more than once. `extra` [n, path_len] holds tokens that count as
        output of their entry alone, padded with -1. Where the entries of each row are the nodes of a chain, given by
        their own tokens, those after a draft that was not drawn may be NOTHING: nobody will ask for them.
        """
        paths = [self._path(row) for row in rows_host]
        assert logits.shape == (len(paths), self._vocab_size), (logits.shape, len(paths), self._vocab_size)
        entries = _Entries(rows=rows.to(torch.int64), positions=positions.to(torch.int64), extra=extra)
        changed = [i for i, path in enumerate(paths) if not path.is_plain]
        if self._host_draw is not None and not any(paths[i].changes_logits for i in changed):
            return self._draw_on_host(self._host_draw, logits, entries, paths, chain_tokens)
        if len(changed) < len(paths):
            tokens = self._ops.argmax(logits)  # ties: the lowest id
        else:
            tokens = torch.zeros(len(paths), dtype=torch.int64, device=logits.device)
        chunk_len = max(1, CHUNK_ELEMENTS_MAX // self._vocab_size)
        for first in range(0, len(changed), chunk_len):
            chunk = changed[first : first + chunk_len]
            index = self._device.put(np.array(chunk, dtype=np.int64))
            own = logits[index].to(torch.float32)  # a copy: the caller's logits stay as they are
            tokens[index] = self._choose(own, entries.pick(index), [paths[i] for i in chunk])
        return tokens

    @torch.inference_mode()
    def note(self, rows: Tensor, tokens: Tensor) -> None:
        """Count tokens [n] that joined the output of `rows` [n]; -1 is nothing."""
        if self._output_counts is None:
            return
        rows, tokens = rows.to(torch.int64), tokens.to(torch.int64)
        places = rows * self._vocab_size + tokens.clamp(min=0)
        counted = (tokens >= 0).to(torch.int32)  # of every row: one without a penalty never reads it
        self._output_counts.view(-1).scatter_add_(0, places, counted)

    def _choose(self, logits: Tensor, entries: _Entries, paths: list[_Path]) -> Tensor:
        """Tokens of entries whose logits are changed or drawn from; the logits are used up."""
        most = max(path.num_biases for path in paths)
        self._change(logits, entries, [path.num_biases > 0 for path in paths], partial(self._biased, width=most))
        self._change(logits, entries, [path.penalises for path in paths], self._penalised)
        self._change(logits, entries, [path.holds_stops for path in paths], self._without_stops)
        logits = draw.sane(logits)
        drawing = [i for i, path in enumerate(paths) if not path.is_greedy]
        if len(drawing) == len(paths):
            return self._draw(logits, entries, paths)
        tokens = logits.argmax(dim=-1)
        if drawing:
            index = self._device.put(np.array(drawing, dtype=np.int64))
            tokens[index] = self._draw(logits[index], entries.pick(index), [paths[i] for i in drawing])
        return tokens

    def _change(self, values: Tensor, entries: _Entries, concerned: list[bool], change: _Change) -> None:
        """Replace the values [n, vocab] of the entries concerned, and of no other."""
        if all(concerned):
            values.copy_(change(values, entries))
        elif any(concerned):
            index = self._device.put(np.flatnonzero(concerned))
            values[index] = change(values[index], entries.pick(index))

    def _biased(self, logits: Tensor, entries: _Entries, *, width: int) -> Tensor:
        ids, biases = (each[entries.rows, :width] for each in (self._draws.bias_ids, self._draws.biases))
        return logits.scatter_add(1, ids, biases)

    def _penalised(self, logits: Tensor, entries: _Entries) -> Tensor:
        assert self._in_prompt is not None and self._output_counts is not None
        rows = entries.rows
        counts = self._output_counts[rows]  # [n, vocab], a copy
        if entries.extra is not None:
            path = entries.extra.to(torch.int64)
            counts.scatter_add_(1, path.clamp(min=0), (path >= 0).to(torch.int32))
        in_output = counts > 0
        repetition = self.numbers["repetition_penalty"][rows].to(torch.float32).unsqueeze(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(self._in_prompt[rows] | in_output, repeated, logits)
        frequency = self.numbers["frequency_penalty"][rows].to(torch.float32).unsqueeze(1)
        presence = self.numbers["presence_penalty"][rows].to(torch.float32).unsqueeze(1)
        return logits - frequency * counts - presence * in_output

    def _without_stops(self, logits: Tensor, entries: _Entries) -> Tensor:
        ids = self._stop_ids[entries.rows]  # [n, widest]
        is_held = (entries.positions < self.numbers["min_len"][entries.rows]).unsqueeze(1) & (ids >= 0)
        forbidden = torch.zeros_like(ids, dtype=torch.float32).masked_fill(is_held, -torch.inf)
        return logits.scatter_add(1, ids.clamp(min=0), forbidden)

    def _draw(self, logits: Tensor, entries: _Entries, paths: list[_Path]) -> Tensor:
        """Tokens drawn from sane logits, of which top-k, top-p and min-p may leave a part."""
        self._change(logits, entries, [path.truncates for path in paths], partial(self._truncated, paths=paths))
        return self._ops.draw(logits, entries.rows, entries.positions, self._draws)

    def _draw_on_host(
        self,
        host: host_draw.HostDraw,
        logits: Tensor,
        entries: _Entries,
        paths: list[_Path],
        chain_tokens: Sequence[int] | None,
    ) -> Tensor:
        """Tokens of entries whose logits nobody changes, where they are in the host's memory: one after the other."""
        logits = logits.to(torch.float32)
        tokens: list[int] = []
        rows, positions, values = entries.rows.tolist(), entries.positions.tolist(), logits.numpy()
        numbers = {name: column.numpy() for name, column in self.numbers.items()}
        for i, (row, path) in enumerate(zip(rows, paths, strict=True)):
            if chain_tokens is not None and i and rows[i - 1] == row and tokens[-1] != chain_tokens[i]:
                tokens.append(NOTHING)
                continue
            if path.is_plain:
                tokens.append(int(values[i].argmax()))
                continue
            token = None
            if not path.is_greedy:
                token = host.draw(
                    values[i],
                    draw_key(int(numbers["seed"][row]), positions[i]),
                    temperature=float(numbers["temperature"][row]),
                    top_k=path.top_k,
                    top_p=float(numbers["top_p"][row]),
                    min_p=float(numbers["min_p"][row]),
                )
            if token is None:  # it is not certain: the reference says it
                token = int(self._choose(logits[i : i + 1], entries.pick(slice(i, i + 1)), [path]))
            tokens.append(token)
        return torch.tensor(tokens, dtype=torch.int64)

    def _truncated(self, logits: Tensor, entries: _Entries, *, paths: list[_Path]) -> Tensor:
        """The logits of entries that truncate, -inf where a token is left out.

        Only rows that need an order are put in one, only for top-p alone in full.
        """
        paths = [path for path in paths if path.truncates]
        weights = draw.weights_of(logits, self.numbers["temperature"][entries.rows])
        short = [path.top_k < self._vocab_size for path in paths]
        full = [path.has_top_p and not is_short for path, is_short in zip(paths, short, strict=True)]
        k_max = max((path.top_k for path, is_short in zip(paths, short, strict=True) if is_short), default=0)
        for concerned, most in ((short, k_max), (full, self._vocab_size)):
            if any(concerned):
                index = slice(None) if all(concerned) else self._device.put(np.flatnonzero(concerned))
                rows = entries.rows[index]
                limits = self.numbers["top_k"][rows], self.numbers["top_p"][rows]
                weights[index] = draw.truncated(logits[index], weights[index], *limits, most)
        if any(path.has_min_p for path in paths):
            weights = draw.above(weights, self.numbers["min_p"][entries.rows])
        return logits.masked_fill(weights == 0, -torch.inf)

    def _set_draws(self, row: int, sampling: SamplingParams, path: _Path) -> None:
        """What a draw reads of a row."""
        draws, put = self._draws, self._device.put
        reals = [0.0 if path.is_greedy else sampling.temperature, sampling.top_p, sampling.min_p]
        draws.reals[:, row] = put(np.array(reals, dtype=np.float32))
        draws.wholes[:, row] = put(np.array([sampling.seed, path.top_k, path.num_biases], dtype=np.int64))
        if path.num_biases:
            ids, biases = zip(*sampling.logit_bias, strict=True)
            draws.bias_ids[row].zero_()[: len(ids)] = put(np.array(ids, dtype=np.int64))
            draws.biases[row].zero_()[: len(ids)] = put(np.array(biases, dtype=np.float32))

    def _count(self, setup: RowSetup) -> None:
        """Count a row's prompt and output so far."""
        tokens = setup.tokens
        assert len(tokens) >= setup.prompt_len, (len(tokens), setup.prompt_len)
        assert not len(tokens) or 0 <= tokens.min() <= tokens.max() < self._vocab_size, "token outside the vocabulary"
        if self._in_prompt is None or self._output_counts is None:
            shape = (len(self._paths), self._vocab_size)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device.torch)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device.torch)
        sent = self._device.put(tokens.astype(np.int64))
        prompt, output = sent[: setup.prompt_len], sent[setup.prompt_len :]
        self._in_prompt[setup.row].zero_().index_fill_(0, prompt, 1)
        counts = self._output_counts[setup.row].zero_()
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def _path(self, row: int) -> _Path:
        path = self._paths[row]
        assert path is not None, f"row {row} samples before it began"
        return path

    def _with_row(self, table: Tensor, row: int, values: np.ndarray, padding: int) -> Tensor:
        """The table [num_rows, width] with one row replaced; wider than before if the values need it."""
        num_rows, width = table.shape
        if len(values) > width:
            wider = table.new_full((num_rows, 1 << (len(values) - 1).bit_length()), padding)
            wider[:, :width] = table
            table = wider
        table[row].fill_(padding)[: len(values)] = self._device.put(values)
        return table
