"""Log-probabilities of a step: those of its output tokens and of the prompt's own, for the rows that ask.

From raw logits, at temperature 1, before bias, penalties and truncation. Works on logits that the step has anyway;
those of a long prompt are made, and all are looked at, piece by piece. Nothing waits for the device: columns stay there
until the result is fetched. Called by the runner.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Device
from roost.layers.segments import aranges
from roost.sampling.draw import ranking_keys, sane
from roost.step import Ints, LogprobColumns, StepPlan

LOGPROB_POSITIONS_MAX = 256  # positions whose log-probabilities over the vocabulary exist at one time

Columns = tuple[Tensor, Tensor, Tensor]  # log-probabilities [n], the best ids and theirs [n, num_top]


def log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [n] of `chosen` [n], and ids and log-probabilities [n, num_top] of the best tokens, best first.

    `num_top` is the most that any row wants, 0 for none; equal logits are listed lowest ids first.
    """
    assert 0 <= num_top <= logits.shape[-1], (num_top, logits.shape)
    logits = sane(logits.to(torch.float32))
    best = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    shifted = logits - best  # small where it matters, so that float32 does
    total = shifted.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    log_total = total.log().clamp(min=torch.finfo(torch.float32).min).to(torch.float32)
    chosen_logprobs = shifted.gather(1, chosen.to(torch.int64).unsqueeze(1)) - log_total
    top_ids = ranking_keys(logits).topk(num_top, dim=-1).indices
    return chosen_logprobs.squeeze(1), top_ids, shifted.gather(1, top_ids) - log_total


def output_logprobs(logits: Tensor, at: Tensor, tokens: Tensor, num_top: int) -> Columns:
    """Columns of output tokens, each after the logits `at` its place."""
    num_top = min(num_top, logits.shape[-1])
    return _whole([log_probabilities(logits[at[part]], tokens[part], num_top) for part in _parts(len(at))])


def prompt_counts(plan: StepPlan) -> np.ndarray:
    """Prompt positions of each row that are scored."""
    return np.where(plan.prompt_logprob_starts < 0, 0, plan.prompt_logprob_ends - plan.prompt_logprob_starts)


def prompt_logprobs(
    plan: StepPlan, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], device: Device
) -> Columns | None:
    """What the model gave the prompt's own tokens, where a row asked for it."""
    counts = prompt_counts(plan)
    if not counts.any():
        return None
    scored = np.flatnonzero(counts)
    offsets = np.cumsum(plan.query_lens) - plan.query_lens
    firsts = offsets[scored] + plan.prompt_logprob_starts[scored] - plan.start_positions[scored]
    index = np.repeat(firsts, counts[scored]) + aranges(counts[scored])
    followers = np.concatenate([_followers(plan, i) for i in scored.tolist()])
    num_top = plan.num_top_logprobs[scored].clip(min=0).max()
    sent = device.send({"index": index, "followers": followers})
    pieces = []
    for part in _parts(len(index)):
        logits = logits_of(hidden[sent["index"][part]])
        pieces.append(log_probabilities(logits, sent["followers"][part], min(int(num_top), logits.shape[-1])))
    return _whole(pieces)


def logprob_columns(counts: np.ndarray, columns: list[np.ndarray]) -> LogprobColumns:
    """Fetched columns of as many entries as each row has."""
    logprobs, top_ids, top_logprobs = columns
    ids = top_ids.astype(np.int32)
    return LogprobColumns(offsets=offsets_of(counts), logprobs=logprobs, top_ids=ids, top_logprobs=top_logprobs)


def offsets_of(counts: np.ndarray) -> Ints:
    """First entry of each row, and the end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _followers(plan: StepPlan, row: int) -> Ints:
    """The tokens after the scored positions of a chunk."""
    chunk = plan.tokens[plan.token_offsets[row] : plan.token_offsets[row + 1]]
    following = np.append(chunk[1:], plan.next_tokens[row])  # a scored position is never the prompt's last
    start = plan.start_positions[row]
    return following[plan.prompt_logprob_starts[row] - start : plan.prompt_logprob_ends[row] - start]


def _parts(length: int) -> list[slice]:
    """Pieces that keep the log-probabilities of a long prompt, or of many rows, from filling the memory."""
    return [slice(first, first + LOGPROB_POSITIONS_MAX) for first in range(0, length, LOGPROB_POSITIONS_MAX)]


def _whole(pieces: list[Columns]) -> Columns:
    logprobs, top_ids, top_logprobs = (torch.cat(column) for column in zip(*pieces, strict=True))
    return logprobs, top_ids, top_logprobs
