"""Root-mean-square norm, the torch reference.

y = weight * x / sqrt(mean(x^2) + eps), computed in float32 and rounded before the weight. Called by models.
"""

import torch
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of `hidden`."""
    wide = hidden.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * (wide * scale).to(hidden.dtype)
