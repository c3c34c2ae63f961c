"""Batches read by the kernels of attention, by teams of several sizes."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roost.attention.kv_cache import LayerKv
from roost.attention.protocol import ReadKv
from roost.layers.quantised_kv import dequantise, quantise
from roost.layers.segments import Segments, segment_attention
from roost.models.model import KvShape
from tests.support.attention_batches import NOWHERE, Batch, Shape

backends = pytest.importorskip("roost.attention.numba_backend", exc_type=ImportError)
executions = pytest.importorskip("roost.numba_kernels.execution", exc_type=ImportError)

SCALE = 0.21
CPU = torch.device("cpu")
FP32, FP16, INT8 = torch.float32, torch.float16, torch.int8


execution_of = cache(executions.Execution)


def team_of(size: int, num_partials: int | None = None) -> "backends.NumbaAttention":
    """A backend whose records are run by so many threads."""
    more = {} if num_partials is None else {"num_partials": num_partials}
    return backends.NumbaAttention(SimpleNamespace(), execution_of(size), **more)


def kept(batch: Batch, dtype: torch.dtype) -> tuple[LayerKv, Tensor, Tensor]:
    """The batch's KV as a cache keeps it, and the keys and values that are read there."""
    if dtype != INT8:
        keys, values = batch.keys.to(dtype), batch.values.to(dtype)
        return LayerKv(keys, values, None), keys.to(FP32), values.to(FP32)
    (keys, key_scales), (values, value_scales) = (quantise(each, dtype) for each in (batch.keys, batch.values))
    scales = torch.stack([key_scales.t(), value_scales.t()], dim=1).contiguous()
    return (
        LayerKv(keys, values, scales),
        dequantise(keys, key_scales, FP32),
        dequantise(values, value_scales, FP32),
    )


def reader(
    attention: "backends.NumbaAttention",
    layer: LayerKv,
    table: Tensor,
    segments: Segments,
    *,
    page_size: int,
    window: int | None,
) -> ReadKv:
    """The backend's plan for layers like this one."""
    pages = SimpleNamespace(pages=table, page_size=page_size, window=window)
    shape = layer.keys.shape
    kv = KvShape(num_kv_heads=shape[1], head_dim=shape[2], scale=SCALE, dtype=layer.keys.dtype, window=window)
    return attention.read(pages, segments, kv)


def read(
    attention: "backends.NumbaAttention", query: Tensor, layer: LayerKv, table: Tensor, segments: Segments, **how: Any
) -> Tensor:
    """What the backend reads."""
    return reader(attention, layer, table, segments, **how)(query, layer)


def both(
    batch: Batch,
    shape: Shape,
    dtype: torch.dtype = FP32,
    size: int = 1,
    num_partials: int | None = None,
    by: "backends.NumbaAttention | None" = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the kernels read of a batch, and what the reference reads, with zeros in place of what nobody may read."""
    layer, keys, values = kept(batch, dtype)
    how = {"page_size": shape.page_size, "window": shape.window}
    read_all = reader(by or team_of(size, num_partials), layer, batch.table, batch.segments, **how)
    ours = read_all(batch.query, layer, sinks)
    table = batch.table.where(batch.table < NOWHERE, 0)
    args = (batch.query, keys.nan_to_num(), values.nan_to_num(), table, batch.segments)
    return ours, segment_attention(*args, **how, scale=SCALE, sinks=sinks)
