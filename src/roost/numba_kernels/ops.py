"""The operations of a step by Numba's kernels; what has none runs as torch has it.

A projection is kept packed (`PackedLinear`), with the records of its product: a call writes addresses into them and has
the team run them. Chosen with the numba backend; called by models.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roost.layers import host_gumbel, host_lookup
from roost.layers.gated_delta import NORM_EPS, DeltaWeights, Recurrence
from roost.layers.gguf_blocks import GgufLinear
from roost.layers.linear import Int8Linear, Linear
from roost.layers.ops import TORCH_OPS, Ops, Residual, argmax_on_host
from roost.layers.rotary import CosSin
from roost.layers.token_mask import mask_logits_on_host
from roost.numba_kernels import activation as activations
from roost.numba_kernels import best_output, embedding, linear, program, rows
from roost.numba_kernels import gated_delta as delta
from roost.numba_kernels.execution import NotRecordable, RecordedPass, exclusive, execution
from roost.numba_kernels.packing import PackedWeight, pack_blocks, pack_int8
from roost.numba_kernels.records import NUM_FIELDS
from roost.numba_kernels.simd import BYTE_OFFSET, LANES

_KINDS = {"Q4_0": linear.Q4_0, "Q4_1": linear.Q4_1, "Q8_0": linear.Q8_0, "INT8": linear.INT8}
_ACTIVATIONS = {"silu": activations.SILU, "gelu_pytorch_tanh": activations.GELU_TANH}


class PackedLinear:
    """A projection by packed weights."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.is_gated = weight.is_gated
        self._records = np.zeros((2, NUM_FIELDS), dtype=np.int64)
        self._records[:, 0] = program.ROUND_TOKENS, program.LINEAR
        self._records[:, linear.KIND] = _KINDS[weight.kind]
        self._records[:, linear.WEIGHTS] = weight.data.data_ptr()
        self._records[:, linear.IN_LEN] = weight.in_len
        self._records[:, linear.BIAS] = 0 if bias is None else bias.data_ptr()

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        assert not self.is_gated
        return self.run(hidden.flatten(0, -2), linear.STORE).unflatten(0, hidden.shape[:-1])

    @exclusive
    def run(
        self,
        tokens: Tensor,
        mode: int,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        activation: str = "silu",
    ) -> Tensor:
        """The product of tokens [num_tokens, in_len], read through a norm, with what `mode` adds."""
        device, num_tokens, in_len = execution(), len(tokens), self._weight.in_len
        out_len = self._weight.out_len // 2 if mode == linear.GATE else self._weight.out_len
        output = device.empty(num_tokens, out_len)
        if num_tokens == 0:
            return output
        tokens = _rows(tokens)
        residual = None if residual is None else _rows(residual)
        records = self._records
        for number, value in (
            (linear.NUM_TOKENS, device.count_at(num_tokens)),
            (linear.TOKENS, tokens.data_ptr()),
            (linear.TOKENS_STRIDE, tokens.stride(0)),
            (linear.NORM, 0 if norm is None else norm.data_ptr()),
            (linear.EPS, _bits(eps)),
            (linear.OUT_LEN, out_len),
            (linear.OUTPUT, output.data_ptr()),
            (linear.OUTPUT_STRIDE, out_len),
            (linear.MODE, mode),
            (linear.RESIDUAL, 0 if residual is None else residual.data_ptr()),
            (linear.RESIDUAL_STRIDE, 0 if residual is None else residual.stride(0)),
            (linear.SCRATCH, device.scratch(linear.scratch_bytes(in_len, num_tokens, device.team.size))),
            (linear.ACTIVATION, _ACTIVATIONS[activation]),
        ):
            records[:, number] = value
        device.perform(records)
        return output

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, as floats."""
        return _embed(outputs, _KINDS[self._weight.kind], self._weight.data, self._weight.in_len)


@exclusive
def _embed(tokens: Tensor, kind: int, table: Tensor, length: int) -> Tensor:
    device, count = execution(), tokens.numel()
    found = device.empty(*tokens.shape, length)
    if count:
        device.perform_one(
            program.EMBED,
            {
                embedding.NUM_TOKENS: device.count_at(count),
                embedding.IDS: tokens.contiguous().data_ptr(),
                embedding.KIND: kind,
                embedding.WEIGHTS: table.data_ptr(),
                embedding.IN_LEN: length,
                embedding.OUTPUT: found.data_ptr(),
            },
        )
    return found


def _look_up(table: Tensor, tokens: Tensor) -> Tensor:
    if table.dtype == torch.int64:  # of numbers: each is copied as two floats
        assert table.ndim == 1 and table.is_contiguous(), table.shape
        return _embed(tokens, linear.FLOAT32, table, 2).view(torch.int64).view(tokens.shape)
    assert table.dtype == torch.float32 and table.is_contiguous(), table.dtype
    return _embed(tokens, linear.FLOAT32, table, table.shape[1])


def _rows(tokens: Tensor) -> Tensor:
    """With the numbers of a token next to each other, as kernels read them."""
    assert tokens.dtype == torch.float32, tokens.dtype
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def _bits(value: float) -> int:
    return int(np.float64(value).view(np.int64))


@exclusive
def _norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    device, length = execution(), hidden.shape[-1]
    output = device.empty(*hidden.shape)
    if not len(hidden):
        return output
    hidden = _rows(hidden)
    parts = hidden.shape[1:-1].numel()
    assert hidden.ndim == 2 or (hidden.ndim == 3 and hidden.stride(1) == length), (hidden.shape, hidden.stride())
    device.perform_one(
        program.NORM,
        {
            rows.NUM_TOKENS: device.count_at(len(hidden)),
            rows.PARTS: parts,
            rows.LENGTH: length,
            rows.SOURCE: hidden.data_ptr(),
            rows.SOURCE_STRIDE: hidden.stride(0),
            rows.TARGET: output.data_ptr(),
            rows.TARGET_STRIDE: parts * length,
            rows.OTHER: weight.data_ptr(),
            rows.OTHER_STRIDE: length if weight.ndim == 2 else 0,
            rows.EPS: _bits(eps),
        },
    )
    return output


@exclusive
def _put(source: Tensor, added: Tensor | None, target: Tensor, factor: float = 1.0) -> None:
    """Write rows, or sums of rows, to a place, times a factor."""
    if not len(source):
        return
    device, source = execution(), _rows(source)
    device.perform_one(
        program.ADD,
        {
            rows.NUM_TOKENS: device.count_at(len(source)),
            rows.LENGTH: source.shape[1],
            rows.SOURCE: source.data_ptr(),
            rows.SOURCE_STRIDE: source.stride(0),
            rows.TARGET: target.data_ptr(),
            rows.TARGET_STRIDE: target.stride(0),
            rows.OTHER: 0 if added is None else added.data_ptr(),
            rows.OTHER_STRIDE: 0 if added is None else added.stride(0),
            rows.FACTOR: 0 if factor == 1.0 else _bits(factor),
        },
    )


@exclusive
def _gate_by(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    device, output = execution(), execution().empty(*gate.shape)
    if len(gate):
        gate, up = _rows(gate), _rows(up)
        device.perform_one(
            program.GATE_BY,
            {
                rows.NUM_TOKENS: device.count_at(len(gate)),
                rows.LENGTH: gate.shape[1],
                rows.SOURCE: gate.data_ptr(),
                rows.SOURCE_STRIDE: gate.stride(0),
                rows.TARGET: output.data_ptr(),
                rows.TARGET_STRIDE: output.stride(0),
                rows.OTHER: up.data_ptr(),
                rows.OTHER_STRIDE: up.stride(0),
                rows.ACTIVATION: _ACTIVATIONS[activation],
            },
        )
    return output


@exclusive
def _scaled_sum(stream: Residual, factor: float) -> Tensor:
    if stream.added is None and factor == 1.0:
        return stream.hidden
    total = execution().empty(*stream.hidden.shape)
    added = None if stream.added is None else _rows(stream.added).flatten(0, -2)
    _put(stream.hidden.flatten(0, -2), added, total.flatten(0, -2), factor)
    return total


@exclusive
def _gated_delta(inputs: Tensor, weights: DeltaWeights, at: Recurrence) -> Tensor:
    """At once alone: where rows start, and what is kept, no recording would be told."""
    device, replay, segments, shape = execution(), at.replay, at.replay.segments, weights.shape
    if device.is_recording:
        raise NotRecordable("a recurrence")
    inputs, said = _rows(inputs), torch.empty((len(inputs), shape.num_value_heads, shape.value_dim))
    if not len(inputs):
        return said
    columns = torch.cat([replay.sources[:, None], replay.starts[:, None], replay.kept_at, replay.kept_in], dim=1)
    trees = None if segments.tree_mask is None else segments.tree_of
    mask = None if trees is None else segments.tree_mask
    floats = delta.scratch_floats(shape.key_dim, shape.value_dim, shape.conv_len)
    assert at.inputs.is_contiguous() and at.states.is_contiguous() and at.tails.is_contiguous()
    device.perform_one(
        program.GATED_DELTA,
        {
            delta.NUM_SEGMENTS: len(segments.rows),
            delta.INPUTS: inputs.data_ptr(),
            delta.INPUT_STRIDE: inputs.stride(0),
            delta.SLOTS: replay.slots.data_ptr(),
            delta.KEPT_INPUTS: at.inputs.data_ptr(),
            delta.STATES: at.states.data_ptr(),
            delta.TAILS: at.tails.data_ptr(),
            delta.SAID: said.data_ptr(),
            delta.CONV: weights.conv.data_ptr(),
            delta.DECAY: weights.decay.data_ptr(),
            delta.FORGET_BIAS: weights.forget_bias.data_ptr(),
            delta.ROWS: segments.rows.data_ptr(),
            delta.OFFSETS: segments.offsets.data_ptr(),
            delta.QUERY_LENS: segments.query_lens.data_ptr(),
            delta.START_POSITIONS: segments.start_positions.data_ptr(),
            delta.TABLE: replay.pages.table.data_ptr(),
            delta.TABLE_STRIDE: replay.pages.table.stride(0),
            delta.PAGE_SIZE: replay.pages.size,
            delta.REPLAY: columns.data_ptr(),
            delta.NUM_KEPT: replay.kept_at.shape[1],
            delta.TREE_OF: 0 if trees is None else trees.data_ptr(),
            delta.TREE_MASK: 0 if mask is None else mask.data_ptr(),
            delta.NUM_NODES: 0 if mask is None else mask.shape[1],
            delta.NUM_KEY_HEADS: shape.num_key_heads,
            delta.NUM_VALUE_HEADS: shape.num_value_heads,
            delta.KEY_DIM: shape.key_dim,
            delta.VALUE_DIM: shape.value_dim,
            delta.CONV_LEN: shape.conv_len,
            delta.SCRATCH: device.scratch(4 * floats * device.team.size),
            delta.EPS: _bits(NORM_EPS),
        },
    )
    return said


def _total(stream: Residual) -> Tensor:
    if stream.added is None:
        return stream.hidden
    total = execution().empty(*stream.hidden.shape)
    _put(stream.hidden, _rows(stream.added), total)
    return total


def _concat(parts: Sequence[Tensor]) -> Tensor:
    lengths = [each.shape[1] for each in parts]
    whole = execution().empty(len(parts[0]), sum(lengths))
    for part, place in zip(parts, whole.split(lengths, dim=1), strict=True):
        _put(part, None, place)
    return whole


@exclusive
def _cos_sin(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> CosSin:
    assert dtype == torch.float32, dtype
    device, count, half = execution(), len(positions), len(frequency)
    cosines, sines = device.empty(count, 1, 2 * half), device.empty(count, 1, half)
    if count:
        device.perform_one(
            program.COS_SIN,
            {
                rows.NUM_TOKENS: device.count_at(count),
                rows.LENGTH: half,
                rows.SOURCE: positions.contiguous().data_ptr(),
                rows.FREQUENCY: frequency.data_ptr(),
                rows.COSINES: cosines.data_ptr(),
                rows.SINES: sines.data_ptr(),
            },
        )
    return cosines, sines


@exclusive
def _argmax(logits: Tensor) -> Tensor:
    """Of a product that was just recorded, its outputs are compared as they are made, and are not there afterwards."""
    device = execution()
    if not device.is_recording:
        return argmax_on_host(logits)
    (count, out_len), product = logits.shape, device.last_recorded
    if product is None or not _makes(product, logits):
        raise NotRecordable("argmax of what is not a product")
    num_groups = -(-out_len // LANES)  # no more pieces than that
    found = device.empty(best_output.HEAD_BYTES + best_output.LINE_BYTES * num_groups * count, dtype=torch.uint8)
    best = device.empty(count, dtype=torch.int64)
    product[linear.MODE], product[linear.OUTPUT] = linear.BEST, found.data_ptr()
    device.perform_one(
        program.PICK_BEST,
        {
            best_output.NUM_TOKENS: device.count_at(count),
            best_output.FOUND: found.data_ptr(),
            best_output.BEST: best.data_ptr(),
        },
    )
    return best


@exclusive
def _soft_cap(logits: Tensor, cap: float) -> None:
    """Of a product that was just recorded, its outputs are capped as they are made."""
    device = execution()
    product = device.last_recorded
    if product is not None and _makes(product, logits) and not product[linear.BIAS]:
        product[linear.CAP] = _bits(cap)
    elif len(logits):
        assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
        device.perform_one(
            program.CAP,
            {
                rows.NUM_TOKENS: device.count_at(len(logits)),
                rows.LENGTH: logits.shape[1],
                rows.SOURCE: logits.data_ptr(),
                rows.SOURCE_STRIDE: logits.stride(0),
                rows.FACTOR: _bits(cap),
            },
        )


def _makes(record: np.ndarray, tokens: Tensor) -> bool:
    """Whether a record is the product that writes these rows, and adds nothing to it."""
    return (
        record[0] == program.LINEAR
        and record[linear.MODE] == linear.STORE
        and record[linear.OUTPUT] == tokens.data_ptr()
        and record[linear.OUT_LEN] == tokens.shape[1]
    )


def _keep(project: Linear, is_gated: bool) -> Linear:
    if isinstance(project, Int8Linear):
        values = project.values.t()
        woven = is_gated and len(values) % (2 * LANES) == 0
        return PackedLinear(pack_int8(values, project.scales, offset=BYTE_OFFSET, is_gated=woven), project.bias)
    if isinstance(project, GgufLinear):
        matrix = project.weight.matrix()
        values = matrix.values if matrix.bits == 4 else matrix.values.to(torch.int16) - 128
        woven = is_gated and len(values) % (2 * LANES) == 0
        packed = pack_blocks(
            values, matrix.scales, matrix.minimums, bits=matrix.bits, offset=BYTE_OFFSET, is_gated=woven
        )
        return PackedLinear(packed, project.bias)
    return project


def _add_norm(stream: Residual, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = _total(stream)
    return hidden, _norm(hidden, weight, eps)


def _norm_linear(stream: Residual, weight: Tensor, eps: float, project: Linear) -> tuple[Tensor, Tensor]:
    if not isinstance(project, PackedLinear):
        hidden, normed = _add_norm(stream, weight, eps)
        return hidden, project(normed)
    hidden = _total(stream)
    return hidden, project.run(hidden, linear.STORE, norm=weight, eps=eps)


def _norm_gate_up(
    stream: Residual, weight: Tensor, eps: float, project: Linear, activation: str
) -> tuple[Tensor, Tensor]:
    if not isinstance(project, PackedLinear) or not project.is_gated:
        hidden, both = _norm_linear(stream, weight, eps, project)
        return hidden, TORCH_OPS.gate_up(both, activation)
    hidden = _total(stream)
    return hidden, project.run(hidden, linear.GATE, norm=weight, eps=eps, activation=activation)


def _linear_add(x: Tensor, project: Linear, hidden: Tensor, next_norm: Tensor | None) -> Residual:
    if not isinstance(project, PackedLinear):
        return TORCH_OPS.linear_add(x, project, hidden, next_norm)
    return Residual(project.run(x, linear.ADD, residual=hidden))


NUMBA_OPS = Ops(
    new_pass=RecordedPass,
    keep=_keep,
    look_up=_look_up,
    norm=_norm,
    add_norm=_add_norm,
    norm_linear=_norm_linear,
    norm_gate_up=_norm_gate_up,
    linear_add=_linear_add,
    linear=TORCH_OPS.linear,
    gate_up=TORCH_OPS.gate_up,
    gate_by=_gate_by,
    scaled_sum=_scaled_sum,
    best_experts=TORCH_OPS.best_experts,
    mix_experts=TORCH_OPS.mix_experts,
    gated_delta=_gated_delta,
    concat=_concat,
    argmax=_argmax,
    soft_cap=_soft_cap,
    draw=host_gumbel.draw,
    draft_scores=host_gumbel.draft_scores,
    best_drafts=host_gumbel.best_drafts,
    find_drafts=host_lookup.find_drafts,
    mask_logits=mask_logits_on_host,
    cos_sin=_cos_sin,
    chain_inputs=TORCH_OPS.chain_inputs,
    chain_places=TORCH_OPS.chain_places,
    settle_chains=TORCH_OPS.settle_chains,
)
