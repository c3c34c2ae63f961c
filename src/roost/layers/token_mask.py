"""Token masks: logits without the tokens that a grammar forbids; in torch, and in numpy where the host computes.

A mask has a bit for each token of the vocabulary, 32 in a word, the lowest first. Logits are changed in place: what is
forbidden becomes -inf. The torch form is the reference of the others. One of the `Ops` of models.
"""

import numpy as np
import torch
from torch import Tensor

WORD = 32  # tokens of a word


def mask_logits(logits: Tensor, nodes: Tensor, masks: Tensor) -> None:
    """Forbid tokens at some `nodes` [n] of logits [num_nodes, vocab_size]: those whose bit in `masks` [n, w] is 0."""
    places = torch.arange(WORD, device=masks.device, dtype=masks.dtype)
    is_allowed = ((masks[:, :, None] >> places) & 1).flatten(1)[:, : logits.shape[1]].to(torch.bool)
    logits[nodes] = logits[nodes].masked_fill(~is_allowed, -torch.inf)


def mask_logits_on_host(logits: Tensor, nodes: Tensor, masks: Tensor) -> None:
    """The same in numpy: words that allow all or nothing, which most are, are not taken apart."""
    if logits.dtype != torch.float32 or logits.shape[1] % WORD:
        mask_logits(logits, nodes, masks)
        return
    values, words = logits.numpy(), masks.numpy()
    for number, node in enumerate(nodes.tolist()):
        by_word, own = values[node].reshape(-1, WORD), words[number]
        by_word[own == 0] = -np.inf
        mixed = np.flatnonzero((own != 0) & (own != -1))
        bits = np.unpackbits(own[mixed].view(np.uint8), bitorder="little").reshape(-1, WORD)
        by_word[mixed] = np.where(bits, by_word[mixed], -np.inf)
