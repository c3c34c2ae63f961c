"""Linear layers: the one place that knows in which form a weight matrix is kept.

A layer is made once, at load, and called as a function. Weights come in the type that activations have. Called by
models, for every projection and for the head.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from roost.errors import ConfigError

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]

# --weights -> the type of activations, of KV and of everything that is not a projection
ACTIVATION_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}


def activation_dtype(weights: str) -> torch.dtype:
    """The type of activations and KV beside weights of that form."""
    if weights not in ACTIVATION_DTYPES:
        raise ConfigError(f"--weights must be one of {', '.join(ACTIVATION_DTYPES)}, got {weights}")
    return ACTIVATION_DTYPES[weights]


def make_linear(weight: Tensor, bias: Tensor | None, weights: str) -> Linear:
    """A projection by `weight` [out, in], kept in the form that `weights` says."""
    dtype = activation_dtype(weights)
    if weights == "int8":
        raise ConfigError("--weights int8 is not supported yet; fp32 and bf16 are")
    return partial(torch.nn.functional.linear, weight=weight.to(dtype), bias=None if bias is None else bias.to(dtype))
