"""Scores of a step: log-probabilities of its output tokens and of the prompt's own, for the rows that ask.

Works on logits that the step has anyway; those of a long prompt are made, and all are looked at, piece by piece.
Nothing waits for the device: columns stay there until the result is fetched. Called by the runner.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Device
from roost.forward.layout import ramps
from roost.sampling.logprobs import log_probabilities
from roost.step import Bools, Ints, ScoreColumns, StepPlan

SCORED_MAX = 256  # positions whose scores over the vocabulary exist at one time

Columns = tuple[Tensor, Tensor, Tensor]  # log-probabilities [n], the best ids and theirs [n, top]


def output_scores(logits: Tensor, at: Tensor, tokens: Tensor, top: int) -> Columns:
    """Columns of output tokens, each after the logits `at` its place."""
    top = min(top, logits.shape[-1])
    return _whole([log_probabilities(logits[at[part]], tokens[part], top) for part in _parts(len(at))])


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
    return _whole(pieces)


def scores_of(counts: np.ndarray, columns: list[np.ndarray]) -> ScoreColumns:
    """Fetched columns of as many entries as each row has."""
    logprobs, top_ids, top_logprobs = columns
    ids = top_ids.astype(np.int32)
    return ScoreColumns(offsets=offsets_of(counts), logprobs=logprobs, top_ids=ids, top_logprobs=top_logprobs)


def joined_scores(parts: list[tuple[Bools, ScoreColumns | None]]) -> ScoreColumns | None:
    """Scores of a step that ran in parts, each with some of its rows; alternatives that a part has not are zeros."""
    scored = [(part, scores) for part, scores in parts if scores is not None]
    if not scored:
        return None
    counts = np.zeros(len(scored[0][0]), dtype=np.int64)
    for part, scores in scored:
        counts[part] = np.diff(scores.offsets)
    rows = np.repeat(np.arange(len(counts)), counts)  # of each entry
    top = max(scores.top_ids.shape[1] for _, scores in scored)
    logprobs, top_logprobs = np.zeros(len(rows), np.float32), np.zeros((len(rows), top), np.float32)
    top_ids = np.zeros((len(rows), top), np.int32)
    for part, scores in scored:
        at, width = np.flatnonzero(part[rows]), scores.top_ids.shape[1]
        logprobs[at] = scores.logprobs
        top_ids[at, :width], top_logprobs[at, :width] = scores.top_ids, scores.top_logprobs
    return scores_of(counts, [logprobs, top_ids, top_logprobs])


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
    """Pieces that keep the scores of a long prompt, or of many rows, from filling the memory."""
    return [slice(first, first + SCORED_MAX) for first in range(0, length, SCORED_MAX)]


def _whole(pieces: list[Columns]) -> Columns:
    logprobs, top_ids, top_logprobs = (torch.cat(column) for column in zip(*pieces, strict=True))
    return logprobs, top_ids, top_logprobs
