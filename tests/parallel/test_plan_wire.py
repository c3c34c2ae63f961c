"""The wire of plans: whatever a plan holds comes out as it went in, and nothing else comes out."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.errors import InvariantError
from roost.parallel.plan_wire import decode, encode
from roost.sampling.params import SamplingParams
from roost.spec_shape import DraftKv, SpecShape
from roost.step import RowId, RowSetup, StateColumns, StepId, StepPlan, TableDelta

NUMBERS = st.integers(-1, 2**31 - 1)
TEXTS = st.text(max_size=20)


def column(*shape: int, dtype: type = np.int32) -> st.SearchStrategy[np.ndarray]:
    """Columns of a shape."""
    values = st.booleans() if dtype is np.bool_ else NUMBERS
    size = int(np.prod(shape))
    return st.lists(values, min_size=size, max_size=size).map(lambda each: np.array(each, dtype).reshape(shape))


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.sampled_from([-1, 1, 40]),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-100, 100)), max_size=3).map(tuple),
    seed=st.integers(0, 2**63 - 1),
)
SETUPS = st.builds(
    RowSetup,
    row=st.integers(0, 99).map(RowId),
    sampling=SAMPLINGS,
    prompt_len=st.integers(0, 99),
    min_len=st.integers(0, 99),
    stop_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    tokens=st.integers(0, 5).flatmap(column),
    grammar=TEXTS,
    scope=st.none() | TEXTS,
)


@st.composite
def deltas(draw: st.DrawFn) -> TableDelta:
    """Changes of a table."""
    number, pages = draw(st.integers(0, 3)), draw(st.integers(0, 5))
    three = (draw(column(number)), draw(column(number)), draw(column(number + 1)))
    return TableDelta(rows=three[0], firsts=three[1], offsets=three[2], pages=draw(column(pages)))


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans, of no meaning."""
    rows, books, chunk = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(0, 9))
    own = {"firsts": (books, rows), "ends": (books, rows), "tokens": (chunk,), "token_offsets": (rows + 1,)}
    of_bools = ("is_prefill", "is_final")
    parts = ("step", "shape", "setups", "deltas", "lookup_widths", "head_width", "states", "shown_row")
    names = [each.name for each in fields(StepPlan) if each.name not in parts]
    columns = {
        name: draw(column(*own.get(name, (rows,)), dtype=np.bool_ if name in of_bools else np.int32)) for name in names
    }
    shape = SpecShape(steps=3, topk=draw(st.integers(1, 4)), tokens=4, draft_kv=draw(st.sampled_from(DraftKv)))
    states = StateColumns(
        sources=draw(column(rows)),
        starts=draw(column(rows)),
        kept_at=draw(column(rows, 3)),
        kept_in=draw(column(rows, 3)),
    )
    return StepPlan(
        step=StepId(draw(st.integers(0, 2**40))),
        shape=replace(shape, reads_history=draw(st.booleans()), lookup_steps=draw(st.integers(0, 16))),
        setups=tuple(draw(st.lists(SETUPS, max_size=3))),
        deltas=tuple(draw(deltas()) for _ in range(books)),
        lookup_widths=draw(st.none() | column(rows, 9)),
        head_width=draw(st.integers(1, 17)),
        states=draw(st.none() | st.just(states)),
        shown_row=draw(st.integers(-1, 9)),
        **columns,
    )


def plain(value: Any) -> Any:
    """A plan as what can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist(), value.flags.writeable, value.flags.aligned
    if is_dataclass(value):
        return type(value), {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return tuple(map(plain, value)) if isinstance(value, tuple) else (type(value), value)


@given(plan=plans())
def test_a_plan_comes_out_as_it_went_in(plan: StepPlan) -> None:
    assert plain(decode(encode(plan))) == plain(plan)


@settings(max_examples=50)
@given(plan=plans(), data=st.data())
def test_what_was_cut_or_changed_on_its_way_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    whole = encode(plan)
    place = data.draw(st.integers(0, len(whole) - 1))
    other = data.draw(st.integers(1, 255))
    for broken in (whole[:place], whole[:place] + bytes([whole[place] ^ other]) + whole[place + 1 :], whole + b"\0"):
        with pytest.raises(InvariantError, match="no plan of a step"):
            decode(broken)
