"""Root-mean-square norm, the torch reference.

y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32 with a float32 weight and rounded
once. A weight [num_heads, head_dim] norms each head by its own. Called by models.
"""

import torch
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `hidden`."""
    wide = hidden.to(torch.float32)
    scale = wide.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(hidden.dtype)
