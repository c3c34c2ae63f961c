"""Scores of a step: log-probabilities of its output tokens and of the prompt's own, for the rows that ask.

Works on logits that the step has anyway; those of a long prompt are made piece by piece. Nothing waits for the device:
columns stay there until the result is fetched. Called by the runner.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roost.exec.batch import ramps
from roost.exec.device.device import Device
from roost.exec.logprobs import log_probabilities
from roost.step import Ints, Scores, StepPlan

_SCORED_MAX = 256  # prompt positions whose scores over the vocabulary exist at one time


Columns = tuple[Tensor, Tensor, Tensor]  # log-probabilities [n], the best ids and theirs [n, top]


def output_scores(logits: Tensor, at: Tensor, tokens: Tensor, top: int) -> Columns:
    """Columns of output tokens, each after the logits `at` its place."""
    return log_probabilities(logits[at], tokens, min(top, logits.shape[-1]))


def prompt_counts(plan: StepPlan) -> np.ndarray:
    """Prompt positions of each row that are scored."""
    return np.where(plan.score_froms < 0, 0, plan.score_ends - plan.score_froms)


def prompt_scores(
    plan: StepPlan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], device: Device
) -> Columns | None:
    """What the model gave the prompt's own tokens, where a row asked for it."""
    counts = prompt_counts(plan)
    if not counts.any():
        return None
    scored = np.flatnonzero(counts)
    offsets = np.cumsum(plan.widths) - plan.widths
    firsts = offsets[scored] + plan.score_froms[scored] - plan.starts[scored]
    index = np.repeat(firsts, counts[scored]) + ramps(counts[scored])
    followers = np.concatenate([_followers(plan, i) for i in scored.tolist()])
    top = plan.tops[scored].clip(min=0).max()
    sent = device.send({"index": index, "followers": followers})
    pieces = []
    for part in _parts(len(index)):
        logits = logits_of(hidden[sent["index"][part]])
        pieces.append(log_probabilities(logits, sent["followers"][part], min(int(top), logits.shape[-1])))
    logprobs, top_ids, top_logprobs = (torch.cat(column) for column in zip(*pieces, strict=True))
    return logprobs, top_ids, top_logprobs


def scores_of(counts: np.ndarray, columns: list[np.ndarray]) -> Scores:
    """Fetched columns of as many entries as each row has."""
    logprobs, top_ids, top_logprobs = columns
    ids = top_ids.astype(np.int32)
    return Scores(offsets=offsets_of(counts), logprobs=logprobs, top_ids=ids, top_logprobs=top_logprobs)


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
