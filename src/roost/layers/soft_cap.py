"""Logits that a soft cap holds between -cap and cap, the torch reference.

y = cap * tanh(x / cap), in float32 and rounded once, in place. The order of logits stays, but large ones come close to
each other: whoever draws from them, or compares them, must have them capped. One of the `Ops` of models.
"""

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> None:
    """Hold logits [num_tokens, vocab_size] below a cap, in place."""
    wide = logits.to(torch.float32)  # the same where they are that already
    wide.div_(cap).tanh_().mul_(cap)
    if wide is not logits:
        logits.copy_(wide)
