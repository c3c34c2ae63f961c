"""The Numba backend: attention on a CPU that reads pages in place, bit for bit the same however a batch is cut.

Records of a pass are run by a team of threads. The engine's layers share one plan for each page table, made anew when
the segments are others. Called by the forward passes and drafters.
"""

from functools import partial
from math import e, log2

import numpy as np
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, LayerKv, PageTable
from roost.attention.protocol import ReadKv
from roost.device.device import Device
from roost.errors import InvariantError
from roost.layers.rotary import CosSin
from roost.layers.segments import Segments
from roost.models.model import KvShape
from roost.numba_kernels import attention, attention_plan, program, rotary
from roost.numba_kernels.execution import Execution, execution
from roost.numba_kernels.kv_blocks import FLOATS, HALFS, INT8S
from roost.numba_kernels.records import NUM_FIELDS

KINDS = {torch.float32: FLOATS, torch.float16: HALFS, torch.int8: INT8S}  # what the cache may hold
_ALIGNED = 64  # bytes of a cache line
_NUM_PARTIALS = 16384  # lines: decoding rows in many spans has room, wide chunks read theirs one after the other


class Room:
    """Memory for compiled code, which at least doubles when more is asked for.

    What was given out stays in place: other plans and records may have its address.
    """

    def __init__(self) -> None:
        self._given = [np.zeros(_ALIGNED, dtype=np.uint8)]

    def of(self, num_bytes: int) -> int:
        """The address of so many bytes, which hold anything."""
        if self._given[-1].size < num_bytes + _ALIGNED:
            self._given.append(np.zeros(max(num_bytes + _ALIGNED, 2 * self._given[-1].size), dtype=np.uint8))
        return -(-self._given[-1].ctypes.data // _ALIGNED) * _ALIGNED


class _Plan:
    """A plan and the records of a layer that go with it; they live as long as the team, which may look at them."""

    def __init__(self, table: PageTable) -> None:
        self.table = table  # its address is in the plan, and no other may get it
        self.fields = np.zeros(attention_plan.NUM_PLAN_FIELDS, dtype=np.int64)
        self.put = np.zeros((1, NUM_FIELDS), dtype=np.int64)
        self.layer = np.zeros((2, NUM_FIELDS), dtype=np.int64)
        self.tiles = Room()
        self.num_segments = np.zeros(1, dtype=np.int64)
        self.of: Segments | None = None  # what it was made for
        self.shape: tuple[int, int, int] | None = None  # of that: tokens at most, segments, nodes of a tree
        self.columns: dict[int, Tensor] = {}
        self.put[0, 0] = program.PUT_TILES
        self.layer[:, 0] = program.ATTEND, program.MERGE_SPANS
        self.put[:, attention.PLAN] = self.layer[:, attention.PLAN] = self.fields.ctypes.data


class NumbaAttention:
    """Attention in Numba."""

    def __init__(self, device: Device, run_by: Execution | None = None, num_partials: int = _NUM_PARTIALS) -> None:
        """Records are run by the process's execution, unless told; there is room for so many lines read apart."""
        self._execution = execution() if run_by is None else run_by
        self._num_partials = num_partials
        self._plans: dict[tuple[int, KvShape, int], _Plan] = {}
        self._scratch, self._partials, self._head = Room(), Room(), Room()
        self._written = np.zeros((1, NUM_FIELDS), dtype=np.int64)

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        """One plan for all layers; whoever reads first, or after somebody else, makes it."""

        is_planned = False  # in the pass that is being recorded: once for all of its layers

        def read(query: Tensor, layer: LayerKv, sinks: Tensor | None = None) -> Tensor:
            nonlocal is_planned
            num_tokens, num_heads, _ = query.shape
            with self._execution.lock:
                plan = self._plan(table, kv, num_heads)
                make = partial(self._make, plan, kv, num_tokens, num_heads, layer)
                if self._execution.is_recording:
                    if not is_planned:
                        is_planned = True
                        self._execution.before_run(make)
                        self._execution.perform(plan.put)
                elif plan.of is not segments:
                    make(segments)
                    self._execution.perform(plan.put)
                return self._read(plan, query, layer, sinks)

        return read

    def _plan(self, table: PageTable, kv: KvShape, num_heads: int) -> _Plan:
        key = id(table), kv, num_heads
        if key not in self._plans:
            self._plans[key] = _Plan(table)
        return self._plans[key]

    def _read(self, plan: _Plan, query: Tensor, layer: LayerKv, sinks: Tensor | None) -> Tensor:
        """What a layer reads by a plan."""
        num_tokens, num_heads, head_dim = query.shape
        _check(query, torch.float32)
        if query.stride(1) != head_dim or query.stride(2) != 1:
            query = query.contiguous()
        output = self._execution.empty(num_tokens, num_heads, head_dim)
        records = plan.layer
        records[:, attention.QUERY] = query.data_ptr()
        records[:, attention.QUERY_STRIDE] = query.stride(0) * 4
        records[:, attention.OUTPUT] = output.data_ptr()
        records[:, attention.OUTPUT_STRIDE] = output.stride(0) * 4
        records[:, attention.KEYS] = _address(layer.keys)
        records[:, attention.VALUES] = _address(layer.values)
        records[:, attention.SCALES] = 0 if layer.scales is None else _address(layer.scales)
        if sinks is not None:
            _check(sinks, torch.float32)
        records[:, attention.SINKS] = 0 if sinks is None else _address(sinks)
        self._execution.perform(records)
        return output

    def write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """In one record."""
        with self._execution.lock:
            return self._write(cache, layer, slots, qk, value, cos_sin)

    def _write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        keys, values, scales = cache.layer(layer)
        _check(qk, torch.float32)
        value = value if value[0].is_contiguous() else value.contiguous()
        slots = slots.contiguous()
        record = self._written[0]
        record[rotary.VALUE], record[rotary.VALUE_STRIDE] = value.data_ptr(), value.stride(0) * 4
        record[rotary.SLOTS] = slots.data_ptr()
        record[rotary.KEYS], record[rotary.VALUES] = _address(keys), _address(values)
        record[rotary.SCALES] = 0 if scales is None else _address(scales)
        record[rotary.KIND], record[rotary.NUM_SLOTS] = KINDS[keys.dtype], keys.shape[0]
        return self._rotate(qk, cos_sin, value.shape[1])

    def rotate(self, query: Tensor, cos_sin: CosSin) -> Tensor:
        """In one record, which writes to no slot."""
        with self._execution.lock:
            _check(query, torch.float32)
            return self._rotate(query, cos_sin, 0)

    def _rotate(self, qk: Tensor, cos_sin: CosSin, num_kv_heads: int) -> Tensor:
        """The rotated queries; keys go where the record says, with what it says of values."""
        num_tokens, num_all, head_dim = qk.shape
        query = self._execution.empty(num_tokens, num_all - num_kv_heads, head_dim)
        qk = qk if qk[0].is_contiguous() else qk.contiguous()
        cos, sin = (each.contiguous() for each in cos_sin)
        record = self._written[0]
        record[0] = program.ROTARY_WRITE
        record[rotary.QK], record[rotary.QK_STRIDE] = qk.data_ptr(), qk.stride(0) * 4
        record[rotary.COS], record[rotary.SIN] = cos.data_ptr(), sin.data_ptr()
        record[rotary.QUERY] = query.data_ptr()
        record[rotary.NUM_HEADS], record[rotary.NUM_KV_HEADS] = query.shape[1], num_kv_heads
        record[rotary.HEAD_DIM], record[rotary.NUM_TOKENS] = head_dim, self._execution.count_at(num_tokens)
        record[rotary.SCRATCH] = self._head.of(self._execution.team.size * rotary.scratch_bytes(head_dim))
        self._execution.perform(self._written)
        return query

    def copy(self, cache: KvCache, sources: Tensor, dests: Tensor) -> None:
        """All groups at once."""
        cache.copy(sources, dests)

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Never called: its steps are not captured."""

    def _make(
        self,
        plan: _Plan,
        kv: KvShape,
        num_tokens: int,
        num_heads: int,
        layer: LayerKv,
        segments: Segments,
    ) -> None:
        """Write a plan anew, for up to so many tokens: of a batch like the last one, only what the batch says."""
        fields, num_nodes = plan.fields, 0 if segments.tree_mask is None else segments.tree_mask.shape[1]
        shape = num_tokens, len(segments.rows), num_nodes
        if plan.shape != shape:
            plan.shape = shape
            self._lay_out(plan, kv, num_heads, layer)
        for place, column, dtype in _columns(segments):
            if column is None:
                fields[place] = 0
            else:
                read = plan.columns[place] = column.to(dtype).contiguous()
                fields[place] = read.data_ptr()
        plan.of = segments

    def _lay_out(self, plan: _Plan, kv: KvShape, num_heads: int, layer: LayerKv) -> None:
        """Write what all batches of a shape share."""
        assert plan.shape is not None
        table = plan.table
        fields, (num_tokens, plan.num_segments[0], fields[attention_plan.NUM_NODES]) = plan.fields, plan.shape
        fields[attention_plan.PAGES] = _address(table.pages)
        fields[attention_plan.PAGES_PER_ROW] = table.pages.shape[1]
        fields[attention_plan.PAGE_SIZE] = table.page_size
        fields[attention_plan.WINDOW] = table.window or 0
        factor = fields[attention_plan.FACTOR : attention_plan.FACTOR + 1]
        factor.view(np.float32)[0] = kv.scale * log2(e)
        fields[attention_plan.NUM_HEADS], fields[attention_plan.NUM_KV_HEADS] = num_heads, kv.num_kv_heads
        fields[attention_plan.HEAD_DIM], fields[attention_plan.KIND] = kv.head_dim, KINDS[layer.keys.dtype]
        fields[attention_plan.NUM_SLOTS] = layer.keys.shape[0]
        fields[attention_plan.NUM_SEGMENTS] = plan.num_segments.ctypes.data
        attention_plan.lay_out(fields)
        tiles_max = int(plan.num_segments[0]) + num_tokens // int(fields[attention_plan.TILE_LEN])
        fields[attention_plan.TILES_MAX] = tiles_max
        fields[attention_plan.TILES] = plan.tiles.of(tiles_max * attention_plan.TILE_BYTES)
        fields[attention_plan.PARTIALS_MAX] = self._num_partials
        fields[attention_plan.PARTIALS] = self._partials.of(self._num_partials * attention_plan.line_bytes(kv.head_dim))
        fields[attention_plan.SCRATCH] = self._scratch.of(
            self._execution.team.size * int(fields[attention_plan.SCRATCH_BYTES])
        )


def _columns(segments: Segments) -> tuple[tuple[int, Tensor | None, torch.dtype], ...]:
    """Columns of segments with their places in a plan, and the types that are read there."""
    return (
        (attention_plan.ROWS, segments.rows, torch.int64),
        (attention_plan.START_POSITIONS, segments.start_positions, torch.int64),
        (attention_plan.OFFSETS, segments.offsets, torch.int32),
        (attention_plan.QUERY_LENS, segments.query_lens, torch.int32),
        (attention_plan.TREE_OF, None if segments.tree_mask is None else segments.tree_of, torch.int32),
        (attention_plan.TREE_DEPTHS, segments.tree_depths, torch.int64),
        (attention_plan.TREE_MASK, segments.tree_mask, torch.bool),
        (attention_plan.BRANCH_BASES, segments.branch_bases, torch.int64),
        (attention_plan.BRANCH_SHIFTS, segments.branch_shifts, torch.int64),
    )


def _check(tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise InvariantError(f"the numba backend reads {dtype} on a CPU here, got {tensor.dtype} on {tensor.device}")


def _address(tensor: Tensor) -> int:
    """Where a tensor lies, which must have no holes."""
    if not tensor.is_contiguous():
        raise InvariantError(f"the numba backend reads tensors without holes, got strides {tensor.stride()}")
    return tensor.data_ptr()
