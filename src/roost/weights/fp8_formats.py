"""FP8 checkpoints as published: e4m3 values with a scale per tensor, per output or per block.

One reader serves transformers' `fp8` (DeepSeek and Qwen: blocks with `weight_scale_inv`; AutoFP8: `weight_scale` per
tensor), `fbgemm_fp8` and compressed-tensors. Despite its name, `weight_scale_inv` is what values are multiplied by.
Scales of activations are not read: tokens are scaled when they come. Called by `quantised_folder`.
"""

from math import prod

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.fp8 import FP8, Fp8Weight
from roost.weights.packing import Axes, Axis, Packing, Parts
from roost.weights.quantisation import Quantisation

_SCALES = ("weight_scale", "weight_scale_inv")


def read_fp8(parts: Parts, quantisation: Quantisation) -> Fp8Weight:
    """The weight of a projection, from its values and scales."""
    found = [name for name in _SCALES if name in parts]
    if "weight" not in parts or len(found) != 1:
        raise ConfigError(f"it has {', '.join(sorted(parts))}; weight and one of {', '.join(_SCALES)} are needed")
    values, scales = parts["weight"], parts[found[0]].to(torch.float32)
    if values.dtype != FP8 or values.ndim != 2:
        raise ConfigError(f"its weight is {list(values.shape)} of {values.dtype}; a matrix of {FP8} is needed")
    block, in_len = quantisation.block, values.shape[1]
    return Fp8Weight(
        values=values,
        scales=_per_output(scales, values) if block is None else _per_block(scales, values, block),
        block=(1, in_len) if block is None else block,
        rounds_tokens=quantisation.activations != "none",
    )


def _per_output(scales: Tensor, values: Tensor) -> Tensor:
    """One scale for each output, [out_len, 1]; the one of a tensor is every output's."""
    out_len = values.shape[0]
    if scales.numel() not in (1, out_len):
        raise ConfigError(f"it has {scales.numel()} scales for {out_len} outputs; one is needed, or one for each")
    return scales.reshape(-1, 1).expand(out_len, 1).contiguous()


def _per_block(scales: Tensor, values: Tensor, block: tuple[int, int]) -> Tensor:
    expected = [-(-length // size) for length, size in zip(values.shape, block, strict=True)]
    if list(scales.shape) != expected:
        raise ConfigError(f"its scales are {list(scales.shape)}, blocks of {list(block)} need {expected}")
    return scales.contiguous()


def _axes(part: str, shape: tuple[int, ...], quantisation: Quantisation) -> Axes:
    if part == "weight":
        return Axis(0), Axis(1)
    if quantisation.block is not None:
        rows, columns = quantisation.block
        return Axis(0, rows), Axis(1, columns)
    return Axis(0) if prod(shape) > 1 else None, None


FP8_PACKING = Packing(
    parts={"weight": ("F8_E4M3",), **dict.fromkeys(_SCALES, ())},
    marks=_SCALES,
    read=read_fp8,
    axes=_axes,
    # of activations and KV, which are scaled as they come or not quantised; fbgemm's upper bound of such scales
    unused=("input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"),
)
