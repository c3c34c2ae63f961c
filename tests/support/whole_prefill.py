"""A whole text in one forward pass over an empty KV cache of any type: what every other way to serve it must equal.

Used by the slow reference where KV is quantised, which transformers does not do.
"""

import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, PageTable, book_of
from roost.attention.protocol import attend_through, make_attention
from roost.attention.recurrent_states import RecurrentStates
from roost.config.resolve import resolve
from roost.device.open import open_device
from roost.layers.convolution import NOTHING_THERE
from roost.models.decoder import Decoder
from tests.support import tiny_models
from tests.support.segments import make_segments

_PAGES = 64  # of a pool; the text lies on the second


@torch.inference_mode()
def prefill_logits(model: Decoder, tokens: tuple[int, ...], kv_cache_dtype: str) -> Tensor:
    """Logits after every token: [num_tokens, vocab_size]."""
    page_size, device = len(tokens), open_device(tiny_models.DEVICE)
    pool = {"page_size": page_size, "pool_tokens": _PAGES * page_size, "window_pool_tokens": _PAGES * page_size}
    resolved = resolve(tiny_models.configure(**pool), model.traits)
    positions = torch.arange(page_size, device=device.torch)
    caches, states = [], None
    numbers = [book_of(kv, resolved.books) for kv in model.kv]
    for book in range(len(resolved.books)):
        table = PageTable(resolved, book, device)
        table.pages[0, 0] = 1
        own = [kv.kept_as(kv_cache_dtype) for kv, number in zip(model.kv, numbers, strict=True) if number == book]
        caches.append(KvCache(table, own))
        if table.is_replayed:
            states = RecurrentStates(caches[-1], 1, 1, device)
    layers = [(number, numbers[:layer].count(number)) for layer, number in enumerate(numbers)]
    segments = make_segments([0], [0], [page_size], are_rounds=False, device=device.torch)
    attention = make_attention(tiny_models.BACKEND, device)
    conv_lens = [kv.window for kv in model.kv if not kv.has_values and kv.window]
    before = _before(positions, page_size, conv_lens[0]) if conv_lens else None
    attend = attend_through(attention, caches, [page_size + positions] * len(caches), segments, layers, before, states)
    return model.logits(model.forward(torch.tensor(tokens, device=device.torch), positions, attend)).cpu()


def _before(positions: Tensor, page_size: int, conv_len: int) -> Tensor:
    """Slots of the inputs before each token, on page 1."""
    back = torch.arange(conv_len - 1, 0, -1, device=positions.device)
    at = positions[:, None] - back
    return torch.where(at < 0, NOTHING_THERE, page_size + at)
