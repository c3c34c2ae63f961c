"""4-bit checkpoints as published: AWQ, GPTQ and compressed-tensors' packed integers, all to one form.

Eight values fill an int32. AWQ packs along the outputs, in an order of its own; GPTQ along the inputs;
compressed-tensors along the inputs, and zero points along the outputs. GPTQ's first format stores zero points less one.
Called by `quantised_folder`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.grouped import GroupedMatrix, check_groups
from roost.layers.int4 import Int4Weight
from roost.weights.packing import Axes, Axis, Packing, Parts
from roost.weights.quantisation import Quantisation

_PER_WORD = 8
_IN_ORDER = tuple(range(_PER_WORD))
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of a word that holds each of eight neighbouring outputs
_MIDDLE = 8  # the zero point of symmetric formats


def read_awq(parts: Parts, quantisation: Quantisation) -> Int4Weight:
    """AWQ's gemm layout: values [in, out / 8], zero points [groups, out / 8], scales [groups, out]."""
    _need(parts, "qweight", "qzeros", "scales")
    values = _unpacked(parts["qweight"], 1, _AWQ_ORDER).t()
    zeros = _unpacked(parts["qzeros"], 1, _AWQ_ORDER).t()
    return _weight(values, parts["scales"].t(), zeros, quantisation)


def read_gptq(parts: Parts, quantisation: Quantisation) -> Int4Weight:
    """GPTQ: values [in / 8, out], zero points [groups, out / 8], scales [groups, out]."""
    _need(parts, "qweight", "qzeros", "scales")
    values = _unpacked(parts["qweight"], 0, _IN_ORDER).t()
    _check_in_order(parts.get("g_idx"), values.shape[1], quantisation.group_size)
    zeros = _unpacked(parts["qzeros"], 1, _IN_ORDER).t()
    if quantisation.packing == "gptq":  # stored less one; the second format stores them as they are
        zeros = (zeros + 1) & (2 * _MIDDLE - 1)
    if quantisation.has_zeros:
        return _weight(values, parts["scales"].t(), zeros, quantisation)
    if parts["qzeros"].any() and not (zeros == _MIDDLE).all():  # some writers leave them at 0, meaning nothing
        raise ConfigError(f"its config says that it is symmetric (sym), but its zero points are not all {_MIDDLE}")
    return _weight(values, parts["scales"].t(), None, quantisation)


def read_compressed(parts: Parts, quantisation: Quantisation) -> Int4Weight:
    """compressed-tensors, pack-quantized: values [out, in / 8], scales [out, groups], zero points [out / 8, groups]."""
    _need(parts, "weight_packed", "weight_scale")
    values = _unpacked(parts["weight_packed"], 1, _IN_ORDER)
    scales = parts["weight_scale"]
    if "weight_shape" in parts:
        out_len, in_len = parts["weight_shape"].tolist()
        if values.shape[0] != out_len or not 0 <= values.shape[1] - in_len < _PER_WORD:
            raise ConfigError(
                f"its weight_packed holds {list(values.shape)}, its weight_shape says {[out_len, in_len]}"
            )
        values = values[:, :in_len]
    _check_in_order(parts.get("weight_g_idx"), values.shape[1], quantisation.group_size)
    zeros = None
    if quantisation.has_zeros:
        _need(parts, "weight_zero_point")
        stored = parts["weight_zero_point"]
        zeros = _unpacked(stored, 0, _IN_ORDER)[: len(values)] if stored.dtype == torch.int32 else stored + _MIDDLE
    return _weight(values, scales, zeros, quantisation)


def _weight(values: Tensor, scales: Tensor, zeros: Tensor | None, quantisation: Quantisation) -> Int4Weight:
    """The weight of values [out, in], scales and zero points [out, groups], after a check that they fit together."""
    out_len, in_len = values.shape
    group_len = quantisation.group_size or in_len
    expected = (out_len, -(-in_len // group_len))
    for name, table in (("scales", scales), ("zero points", zeros)):
        if table is not None and tuple(table.shape) != expected:
            raise ConfigError(
                f"its {name} are {list(table.shape)}, outputs by groups; {out_len} by {in_len} weights in groups of "
                f"{group_len} need {list(expected)}"
            )
    if in_len % group_len:
        raise ConfigError(f"its {in_len} inputs are not whole groups of {group_len}")
    kept = scales if scales.dtype in (torch.float16, torch.bfloat16) else scales.to(torch.bfloat16)
    matrix = GroupedMatrix(
        values=values.contiguous(),
        scales=kept.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.uint8).contiguous(),
    )
    check_groups(matrix)
    return Int4Weight(matrix=matrix)


def _unpacked(words: Tensor, dim: int, order: Sequence[int]) -> Tensor:
    """Eight values for each int32 along a dimension, as uint8; value i of eight is field order[i]."""
    if words.dtype != torch.int32 or words.ndim != 2:
        raise ConfigError(f"its packed values are {list(words.shape)} of {words.dtype}; a matrix of int32 is needed")
    fields = torch.stack([((words >> (4 * field)) & 15).to(torch.uint8) for field in order], dim=dim + 1)
    return fields.flatten(dim, dim + 1)


def _check_in_order(group_of: Tensor | None, in_len: int, group_size: int | None) -> None:
    """Refuse groups whose inputs are not neighbours (act-order)."""
    if group_of is None:
        return
    groups = torch.arange(in_len, device=group_of.device) // (group_size or in_len)
    expected = groups + group_of[:1]  # a part of the inputs may begin at any of them
    if not torch.equal(group_of.to(torch.int64), expected):
        raise ConfigError("its g_idx puts inputs that are not neighbours into one group (act-order), not supported")


def _need(parts: Parts, *names: str) -> None:
    missing = [name for name in names if name not in parts]
    if missing:
        raise ConfigError(f"it has {', '.join(sorted(parts))}, but no {', '.join(missing)}")


def _axes(part: str, shape: tuple[int, ...], quantisation: Quantisation) -> Axes:
    group = quantisation.group_size
    inputs = None if group is None else Axis(0, group)
    match part:
        case "qweight":
            return (Axis(1, _PER_WORD), Axis(0)) if quantisation.packing == "awq" else (Axis(1), Axis(0, _PER_WORD))
        case "qzeros":
            return Axis(1, _PER_WORD), inputs
        case "scales":
            return Axis(1), inputs
        case "g_idx" | "weight_g_idx":
            return None, Axis(0)
        case "weight_packed":
            return Axis(0), Axis(1, _PER_WORD)
    per_word = _PER_WORD if part == "weight_zero_point" else 1
    return Axis(0, per_word), None if group is None else Axis(1, group)


AWQ_PACKING = Packing(
    parts={"qweight": ("I32",), "qzeros": ("I32",), "scales": ()},
    marks=("qweight",),
    read=read_awq,
    axes=_axes,
)
GPTQ_PACKING = Packing(
    parts={"qweight": ("I32",), "qzeros": ("I32",), "scales": (), "g_idx": ("I32", "I64")},
    marks=("qweight",),
    read=read_gptq,
    axes=_axes,
)
COMPRESSED_PACKING = Packing(
    parts={
        "weight_packed": ("I32",),
        "weight_scale": (),
        "weight_zero_point": ("I32", "I8"),
        "weight_shape": ("I64", "I32"),
        "weight_g_idx": ("I32", "I64"),
    },
    marks=("weight_packed",),
    read=read_compressed,
    axes=_axes,
    of_all=("weight_shape",),
)
