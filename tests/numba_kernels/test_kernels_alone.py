"""Each kernel by itself, compiled without the others and without the team: what planted bugs are found by.

A program is compiled once, with every kernel in it, and kept on disk by the sources; a kernel that is called alone is
compiled from what was imported, in a second or a few, and never kept.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from roost.layers.ops import ACTIVATIONS
from roost.numba_kernels import activation as activations
from roost.numba_kernels import attention, attention_plan, embedding, linear, program, rotary, rows
from roost.numba_kernels.records import NUM_FIELDS, RECORD_BYTES
from tests.numba_kernels.runs import CPU, FP16, FP32, INT8, backends, both, executions
from tests.numba_kernels.test_rotary import cache_of, cos_sin, heads_of
from tests.support.attention_batches import Shape, make
from tests.support.canaries import assert_near

KINDS = pytest.mark.parametrize("dtype", [FP32, FP16, INT8], ids=["fp32", "fp16", "int8"])
STEPS = {FP32: 4, FP16: 4, INT8: 128}  # of int8 keys: queries are rounded to 15 bits


class Alone(executions.Execution):
    """One thread that calls kernel after kernel."""

    def __init__(self) -> None:
        super().__init__(size=1)

    def perform(self, records: np.ndarray) -> None:
        """Run records, piece by piece."""
        for number in range(len(records)):
            record, kind = records.ctypes.data + number * RECORD_BYTES, records[number, 0]
            if kind == program.PUT_TILES:
                attention_plan.put_tiles(record, 0, 1)
            elif kind == program.ATTEND:
                for piece in range(num_pieces := attention.attend_pieces(record, 1)):
                    attention.attend(record, piece, num_pieces, 0)
            elif kind == program.MERGE_SPANS:
                for piece in range(num_pieces := attention.merge_pieces(record, 1)):
                    attention.merge_spans(record, piece, num_pieces, 0)
            else:
                assert kind == program.ROTARY_WRITE, kind
                for piece in range(num_pieces := rotary.rotary_pieces(record, 1)):
                    rotary.rotary_write(record, piece, num_pieces, 0)


def attention_alone() -> "backends.NumbaAttention":
    return backends.NumbaAttention(None, Alone())


@KINDS
def test_attention_equals_the_reference(dtype: torch.dtype) -> None:
    for window in (None, 70):
        shape = Shape(num_kv_heads=2, group=3, head_dim=24, page_size=3, dtype=FP32, window=window)
        batch = make(shape, [(0, 1), (300, 5), (63, 40), (600, 1), (70, 8)], CPU, trees=(4,))
        ours, reference = both(batch, shape, dtype, by=attention_alone())
        assert_near(ours, reference, steps=STEPS[dtype])


def test_a_sink_joins_the_sum_of_weights() -> None:
    shape = Shape(num_kv_heads=2, group=3, head_dim=24, page_size=3, dtype=FP32)
    batch = make(shape, [(0, 1), (300, 5), (70, 8)], CPU)
    ours, reference = both(batch, shape, by=attention_alone(), sinks=torch.linspace(-2, 6, 6))
    assert_near(ours, reference, steps=STEPS[FP32])


def test_a_branch_reads_the_text_and_its_own_slots() -> None:
    shape = Shape(num_kv_heads=2, group=3, head_dim=24, page_size=16, dtype=FP32)
    batch = make(shape, [(72, 1)] * 4, CPU, shifts=[(70, 4 * branch) for branch in range(4)])
    ours, reference = both(batch, shape, FP32, by=attention_alone())
    assert_near(ours, reference, steps=STEPS[FP32])


@KINDS
def test_slots_hold_what_was_written_to_them(dtype: torch.dtype) -> None:
    cache, slots = cache_of(2, 16, dtype), torch.tensor([5, 3, 9])
    qk, value = heads_of(3, 6, 16), heads_of(3, 2, 16)
    attention_alone().write(cache, 1, slots, qk, value, cos_sin(torch.zeros(3), 16))  # nothing is rotated
    keys, values, scales = cache.layer(1)
    for number, (kept, written) in enumerate(((keys, qk[:, 4:]), (values, value))):
        found = kept[slots].to(FP32) if scales is None else kept[slots] * scales[:, number, slots].t()[..., None]
        near = {FP32: 0.0, FP16: 1e-3, INT8: 1e-2}[dtype] * written.abs().amax(dim=-1, keepdim=True)
        assert ((found - written).abs() <= near).all()


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A record of one kind, and what it names."""

    record: np.ndarray
    named: tuple[np.ndarray, ...]

    @property
    def address(self) -> int:
        return self.record.ctypes.data


def call_of(kind: int, fields: dict[int, np.ndarray | int]) -> Call:
    record = np.zeros(NUM_FIELDS, dtype=np.int64)
    record[0] = kind
    for place, value in fields.items():
        record[place] = value.ctypes.data if isinstance(value, np.ndarray) else value
    return Call(record=record, named=tuple(value for value in fields.values() if isinstance(value, np.ndarray)))


@pytest.mark.parametrize("length", [48, 41, 3])
def test_a_norm_of_small_numbers_is_held_down_by_eps(length: int) -> None:
    source, weight = (np.random.default_rng(length).normal(size=(3, length)).astype(np.float32) for _ in range(2))
    source[1] *= 1e-3
    target = np.zeros_like(source)
    call = call_of(
        program.NORM,
        {
            rows.NUM_TOKENS: np.array([3]),
            rows.PARTS: 1,
            rows.LENGTH: length,
            rows.SOURCE: source,
            rows.SOURCE_STRIDE: length,
            rows.TARGET: target,
            rows.TARGET_STRIDE: length,
            rows.OTHER: weight[0],
            rows.EPS: int(np.array([1e-5]).view(np.int64)[0]),
        },
    )
    for piece in range(2):
        rows.norm(call.address, piece, 2)
    expected = weight[0] * source / np.sqrt((source.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(target, expected, rtol=1e-5)


@pytest.mark.parametrize("length", [48, 41, 3])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_sums_are_scaled_and_gates_multiply_what_lies_apart(length: int, factor: float) -> None:
    source, wide = (np.random.default_rng(seed).normal(size=(3, 2 * length)).astype(np.float32) * 9 for seed in (1, 2))
    target = np.zeros((3, length), dtype=np.float32)
    fields = {
        rows.NUM_TOKENS: np.array([3]),
        rows.LENGTH: length,
        rows.SOURCE: source,
        rows.SOURCE_STRIDE: 2 * length,
        rows.TARGET: target,
        rows.TARGET_STRIDE: length,
        rows.OTHER: wide,
        rows.OTHER_STRIDE: 2 * length,
        rows.FACTOR: 0 if factor == 1.0 else int(np.array([factor]).view(np.int64)[0]),
    }
    left, right = torch.from_numpy(source[:, :length]), torch.from_numpy(wide[:, :length])
    for piece in range(2):
        rows.add_rows(call_of(program.ADD, fields).address, piece, 2)
    assert torch.equal(torch.from_numpy(target), (left + right) * factor)
    for name, code in (("silu", activations.SILU), ("gelu_pytorch_tanh", activations.GELU_TANH)):
        call = call_of(program.GATE_BY, {**fields, rows.ACTIVATION: code})
        for piece in range(2):
            rows.gate_rows(call.address, piece, 2)
        np.testing.assert_allclose(target, (ACTIVATIONS[name](left) * right).numpy(), rtol=2e-5, atol=2e-5)


def test_an_embedding_is_the_row_of_its_token() -> None:
    table, ids = np.random.default_rng(0).normal(size=(7, 20)).astype(np.float32), np.array([6, 0, 3, 3, 5])
    output = np.zeros((5, 20), dtype=np.float32)
    call = call_of(
        program.EMBED,
        {
            embedding.NUM_TOKENS: np.array([5]),
            embedding.IDS: ids,
            embedding.KIND: linear.FLOAT32,
            embedding.WEIGHTS: table,
            embedding.IN_LEN: 20,
            embedding.OUTPUT: output,
        },
    )
    for piece in range(3):
        embedding.embed(call.address, piece, 3)
    assert (output == table[ids]).all()


def test_a_program_is_handed_out_from_its_first_record_with_pieces_on_and_those_who_sleep_are_counted() -> None:
    control, counts = np.zeros((16, 8), dtype=np.int64), np.array([0, 5])
    records = np.zeros((3, NUM_FIELDS), dtype=np.int64)
    records[:, 0], records[:, rows.NUM_TOKENS] = program.ADD, counts.ctypes.data
    records[2, rows.NUM_TOKENS] += counts.itemsize
    control[program.PARKED // 64 + 2, 0] = 1  # the second of two others
    generation, asleep = program._announce(control.ctypes.data, records.ctypes.data, 3, 3)
    claim, record, num_pieces = (
        control[place // 64, 0] for place in (program.CLAIM, program.RECORD, program.NUM_PIECES)
    )
    assert (generation, asleep) == (1, 1)
    assert claim == ((1 << program._RECORD_BITS) + 2) << program._PIECE_BITS
    assert (record, num_pieces) == (records.ctypes.data + 2 * RECORD_BYTES, 3)
