"""Scores of a step: log-probabilities of its output tokens and of the prompt's own, for the rows that ask.

Works on logits that the step has anyway; those of a long prompt are made piece by piece. Called by the runner, once the
step's tokens are known to the host.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roost.exec.batch import Index, ramps
from roost.exec.logprobs import log_probabilities
from roost.step import Ints, Scores, StepPlan

_SCORED_MAX = 256  # prompt positions whose scores over the vocabulary exist at one time


def output_scores(logits: Tensor, at: Index, tokens: Ints, tops: Ints, offsets: Ints) -> Scores | None:
    """Scores of output tokens, each after the logits `at` its place; `offsets` says which row has which."""
    if len(tops) == 0 or tops.max() < 0:
        return None
    columns = _columns(logits[_sent(at, logits)], _sent(tokens, logits), tops.max())
    return Scores(offsets=offsets, logprobs=columns[0], top_ids=columns[1], top_logprobs=columns[2])


def prompt_scores(plan: StepPlan, starts: Ints, hidden: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Scores | None:
    """What the model gave the prompt's own tokens, where a row asked for it."""
    counts = np.where(plan.score_froms < 0, 0, plan.score_ends - plan.score_froms)
    if not counts.any():
        return None
    scored = np.flatnonzero(counts)
    offsets = np.cumsum(plan.widths) - plan.widths
    firsts = offsets[scored] + plan.score_froms[scored] - starts[scored]
    index = np.repeat(firsts, counts[scored]) + ramps(counts[scored])
    followers = np.concatenate([_followers(plan, i) for i in scored.tolist()])
    top = plan.tops[scored].clip(min=0).max()
    pieces = [
        _columns(logits_of(hidden[_sent(index[part], hidden)]), _sent(followers[part], hidden), top)
        for part in _parts(len(index))
    ]
    logprobs, top_ids, top_logprobs = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Scores(offsets=offsets_of(counts), logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)


def offsets_of(counts: np.ndarray) -> Ints:
    """First entry of each row, and the end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _followers(plan: StepPlan, row: int) -> Ints:
    """The tokens after the scored positions of a chunk."""
    chunk = plan.tokens[plan.token_offsets[row] : plan.token_offsets[row + 1]]
    following = np.append(chunk[1:], plan.next_tokens[row])  # a scored position is never the prompt's last
    start = plan.starts[row]
    return following[plan.score_froms[row] - start : plan.score_ends[row] - start]


def _parts(length: int) -> list[slice]:
    """Pieces that keep the scores of a long prompt from filling the memory."""
    return [slice(first, first + _SCORED_MAX) for first in range(0, length, _SCORED_MAX)]


def _columns(logits: Tensor, tokens: Tensor, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    columns = log_probabilities(logits, tokens, min(int(top), logits.shape[-1]))
    logprobs, top_ids, top_logprobs = (column.cpu().numpy() for column in columns)
    return logprobs, top_ids.astype(np.int32), top_logprobs


def _sent(values: np.ndarray, beside: Tensor) -> Tensor:
    return torch.tensor(values, device=beside.device)
