"""Plan wire: a step's plan as bytes, and back; columns as they lie in memory, never pickled.

Layout: a checksum of all that follows, the length of the header, the header as JSON (numbers, texts, and the type and
shape of each column), then the columns. What was cut or changed on its way is refused. The executor of rank 0 encodes,
followers decode; both know `step`, nothing of models.
"""

import json
import struct
import zlib
from dataclasses import fields
from typing import Any

import numpy as np

from roost.errors import InvariantError
from roost.sampling.params import SamplingParams
from roost.spec_shape import DraftKv, SpecShape
from roost.step import RowId, RowSetup, StateColumns, StepId, StepPlan, TableDelta

_HEAD = struct.Struct("<II")
_DTYPES = ("<i4", "<i8", "|b1")  # of columns
_PARTS = ("step", "shape", "setups", "deltas", "states", "head_width", "shown_row")
_COLUMNS = tuple(each.name for each in fields(StepPlan) if each.name not in (*_PARTS, "lookup_widths"))
_DELTA = tuple(each.name for each in fields(TableDelta))
_STATES = tuple(each.name for each in fields(StateColumns))
_DEFAULTS = SamplingParams()


def encode(plan: StepPlan) -> bytes:
    """A plan as bytes."""
    columns = [getattr(plan, name) for name in _COLUMNS]
    for delta in plan.deltas:
        columns += [getattr(delta, name) for name in _DELTA]
    columns += [setup.tokens for setup in plan.setups]
    if plan.states is not None:
        columns += [getattr(plan.states, name) for name in _STATES]
    if plan.lookup_widths is not None:
        columns.append(plan.lookup_widths)
    shape = plan.shape
    header = {
        "step": int(plan.step),
        "shape": [getattr(shape, each.name) for each in fields(shape) if each.name != "draft_kv"],
        "draft_kv": shape.draft_kv.value,
        "setups": [_setup_fields(setup) for setup in plan.setups],
        "num_deltas": len(plan.deltas),
        "has_states": plan.states is not None,
        "has_lookups": plan.lookup_widths is not None,
        "head_width": int(plan.head_width),
        "shown_row": int(plan.shown_row),
        "columns": [[column.dtype.str, *column.shape] for column in columns],
    }
    text = json.dumps(header).encode()
    body = b"".join([text, *(column.tobytes() for column in columns)])
    return _HEAD.pack(zlib.crc32(body, len(text)), len(text)) + body


def decode(data: bytes) -> StepPlan:
    """The plan in some bytes; raises InvariantError for what is none."""
    try:
        checksum, text_len = _HEAD.unpack_from(data)
        body = memoryview(data)[_HEAD.size :]
        if zlib.crc32(body, text_len) != checksum:
            raise ValueError("its checksum is another")
        header = json.loads(bytes(body[:text_len]))
        return _plan(header, _Columns(header["columns"], body[text_len:]))
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise InvariantError(f"what came is no plan of a step: {error}") from error


def _setup_fields(setup: RowSetup) -> list[Any]:
    """All of a row's set-up but its tokens; of the sampling, what is not a default."""
    names = (each.name for each in fields(SamplingParams))
    sampling = {name: value for name in names if (value := getattr(setup.sampling, name)) != getattr(_DEFAULTS, name)}
    own = (int(setup.row), int(setup.prompt_len), int(setup.min_len), setup.stop_ids, setup.grammar, setup.scope)
    return [*own, sampling]


class _Columns:
    """The columns of a plan, one after the other."""

    def __init__(self, kinds: list[list[Any]], data: memoryview) -> None:
        self._kinds = iter(kinds)
        self._data = data
        self._end = 0

    def next(self) -> np.ndarray:
        """The next one."""
        dtype, *shape = next(self._kinds, ("",))
        if dtype not in _DTYPES or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"a column of {dtype} with {shape}")
        count, start = int(np.prod(shape, dtype=np.int64)), self._end
        self._end += count * np.dtype(dtype).itemsize
        column = np.frombuffer(self._data, np.dtype(dtype), count, start) if count else np.empty(0, np.dtype(dtype))
        return column.reshape(shape).copy()  # aligned: in the message it may not be

    def check_end(self) -> None:
        """Nothing may be left."""
        if next(self._kinds, None) is not None or self._end != len(self._data):
            raise ValueError("it has more columns, or fewer, than it says")


def _plan(header: dict[str, Any], columns: _Columns) -> StepPlan:
    own = {name: columns.next() for name in _COLUMNS}
    deltas = [TableDelta(**{name: columns.next() for name in _DELTA}) for _ in range(header["num_deltas"])]
    setups = [_setup(values, columns.next()) for values in header["setups"]]
    states = StateColumns(**{name: columns.next() for name in _STATES}) if header["has_states"] else None
    lookup_widths = columns.next() if header["has_lookups"] else None
    columns.check_end()
    names = (each.name for each in fields(SpecShape) if each.name != "draft_kv")
    return StepPlan(
        step=StepId(header["step"]),
        shape=SpecShape(**dict(zip(names, header["shape"], strict=True)), draft_kv=DraftKv(header["draft_kv"])),
        setups=tuple(setups),
        deltas=tuple(deltas),
        states=states,
        lookup_widths=lookup_widths,
        head_width=header["head_width"],
        shown_row=header["shown_row"],
        **own,
    )


def _setup(values: list[Any], tokens: np.ndarray) -> RowSetup:
    row, prompt_len, min_len, stop_ids, grammar, scope, sampling = values
    if "logit_bias" in sampling:
        sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    return RowSetup(
        row=RowId(row),
        sampling=SamplingParams(**sampling),
        prompt_len=prompt_len,
        min_len=min_len,
        stop_ids=tuple(stop_ids),
        tokens=tokens,
        grammar=grammar,
        scope=scope,
    )
