"""Rotary position embedding, the torch reference.

Dimension i of a head turns together with dimension i + head_dim / 2, by the angle position * theta^(-2i / head_dim).
Angles are float32 whatever the model's type. Called by models, once a forward for the angles.
"""

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Angles of each token: [num_tokens, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    return positions.to(torch.float32)[:, None] * theta**-exponents


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn queries or keys [num_tokens, num_heads, head_dim] by their angles."""
    cos, sin = angles.cos().to(heads.dtype)[:, None], angles.sin().to(heads.dtype)[:, None]
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
