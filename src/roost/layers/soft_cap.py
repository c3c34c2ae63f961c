"""Logits that a soft cap holds between -cap and cap, the torch reference.

y = cap * tanh(x / cap), in float32 and rounded once, in place. The order of logits stays, but large ones come close to
each other: whoever draws from them, or compares them, must have them capped. One of the `Ops` of models.
"""

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float) -> None:
    """Hold logits below a cap, in place."""
    if logits.dtype == torch.float32:
        logits.div_(cap).tanh_().mul_(cap)
    else:
        logits.copy_((logits.to(torch.float32) / cap).tanh_().mul_(cap))
