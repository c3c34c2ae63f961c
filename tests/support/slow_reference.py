"""A slow reference of a whole generation: for each token the sequence so far runs again through transformers, densely.

Quantised KV, which transformers does not have, runs as one prefill of Roost's. The rules of sampling are written out
here in plain numpy, from what the options promise, and so is the noise of draws. A choice too close
to call in floats fails the test that asks for it: other seeds are to be taken.
"""

from collections import Counter
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from roost.messages import Submit
from roost.models.decoder import Decoder
from roost.sampling.params import SamplingParams
from tests.support.grammars import allowed_after
from tests.support.plain_sampler import draw_key, gumbel
from tests.support.stand_in_heads import checkpoint
from tests.support.whole_prefill import prefill_logits

Reals = NDArray[np.float64]

MARGIN = 1e-5  # closer than this to a border, rounding decides


@cache
def slow_logits(kind: str, tokens: tuple[int, ...], kv_cache_dtype: str = "auto") -> Reals:
    """Logits after every token: [num_tokens, vocab]."""
    if kv_cache_dtype != "auto":
        return prefill_logits(_model(kind), tokens, kv_cache_dtype).to(torch.float64).numpy()
    with torch.no_grad():
        return checkpoint(kind).reference(torch.tensor([tokens])).logits[0].to(torch.float64).numpy()


def slow_logprobs(kind: str, tokens: tuple[int, ...], kv_cache_dtype: str = "auto") -> Reals:
    """Log-probabilities of whatever may follow each token: [num_tokens, vocab]."""
    return torch.from_numpy(slow_logits(kind, tokens, kv_cache_dtype)).log_softmax(-1).numpy()


@cache
def next_tokens(kind: str, text: tuple[int, ...], number: int, kv_cache_dtype: str = "auto") -> tuple[int, ...]:
    """What greedy decoding says next."""
    output: tuple[int, ...] = ()
    for _ in range(number):
        output += (int(slow_logits(kind, text + output, kv_cache_dtype)[-1].argmax()),)
    return output


@cache
def slow_output(kind: str, submit: Submit) -> tuple[tuple[int, ...], str]:
    """What a request must return, and why it ends."""
    assert submit.max_new_tokens is not None
    output: tuple[int, ...] = ()
    while len(output) < submit.max_new_tokens:
        logits = slow_logits(kind, submit.tokens + output)[-1]
        if submit.grammar:
            logits = np.where(allowed_after(submit.grammar, output), logits, -np.inf)
        changed = _changed(logits, submit, output)
        output += (_choice(changed, submit.sampling, len(submit.tokens) + len(output)),)
        if len(output) > submit.min_new_tokens and output[-1] in submit.stop_token_ids:
            return output, "stop"
    return output, "length"


@cache
def _model(kind: str) -> Decoder:
    return checkpoint(kind).model()


def _changed(logits: Reals, submit: Submit, output: tuple[int, ...]) -> Reals:
    """Logits after bias, penalties and what may not stop yet."""
    sampling, changed = submit.sampling, logits.copy()
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    for token in {*submit.tokens, *output}:
        penalty = sampling.repetition_penalty
        changed[token] *= 1 / penalty if changed[token] > 0 else penalty
    for token, count in Counter(output).items():
        changed[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if len(output) < submit.min_new_tokens:
        changed[list(submit.stop_token_ids)] = -np.inf
    return changed


def _choice(changed: Reals, sampling: SamplingParams, position: int) -> int:
    """The best token, or the best with the noise of the position."""
    order = np.argsort(-changed, kind="stable")
    best, second = changed[order[:2]]
    if sampling.temperature == 0 or sampling.top_k == 1:
        assert best - second > MARGIN, f"too close to call: {best} and {second}"
        return int(order[0])
    kept = _kept(order, changed, sampling)
    key = draw_key(sampling.seed, position)
    scores = changed[kept] / sampling.temperature + [gumbel(key, token) for token in kept.tolist()]
    ranked = np.sort(scores)[::-1]
    assert len(kept) == 1 or ranked[0] - ranked[1] > MARGIN, f"too close to call: {ranked[:2]}"
    return int(kept[scores.argmax()])


def _kept(order: NDArray[np.int64], changed: Reals, sampling: SamplingParams) -> NDArray[np.int64]:
    """The tokens that top-k, then top-p of those, then min-p leave, in the order of their ids."""
    if 0 < sampling.top_k < len(order):
        inside, outside = changed[order[sampling.top_k - 1 : sampling.top_k + 1]]
        is_forbidden = np.isneginf(outside)  # by a grammar: no draw comes there
        assert is_forbidden or inside - outside > MARGIN, "too close to call: top_k"
        order = order[: sampling.top_k]
    weights = np.exp((changed[order] - changed[order[0]]) / sampling.temperature)
    before = (np.cumsum(weights) - weights) / weights.sum()
    assert sampling.top_p == 1 or np.abs(before - sampling.top_p).min() > MARGIN, "too close to call: top_p"
    assert sampling.min_p == 0 or np.abs(weights - sampling.min_p).min() > MARGIN, "too close to call: min_p"
    in_top_p = (before < sampling.top_p) | (sampling.top_p == 1)
    return np.sort(order[in_top_p & (weights >= sampling.min_p)])
