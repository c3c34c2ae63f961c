"""Parts of tensors: what ranks read is all there is, and units cover just what lies in them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError
from roost.models.parts import Cut, check_shape, covering, cut, in_units, lengths, part, split

SIZES = st.integers(1, 6)


@given(st.integers(6, 40), SIZES)
def test_splits_are_all_of_it_in_order(whole: int, size: int) -> None:
    tensor = torch.arange(whole * 3).view(whole, 3)
    parts = [cut(tensor, (split(whole, rank, size), 3)) for rank in range(size)]
    assert torch.equal(torch.cat(parts), tensor)
    assert max(map(len, parts)) == len(parts[0])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), SIZES)
def test_a_part_has_its_run_of_every_section(sections: list[int], size: int) -> None:
    tensor = torch.arange(size * sum(sections))
    wanted = [section.chunk(size) for section in tensor.split([size * each for each in sections])]
    for rank in range(size):
        shape = (part(sum(sections), rank, size, sections),)
        assert lengths(shape) == (sum(sections),)
        check_shape("t", tensor.shape, shape)
        assert torch.equal(cut(tensor, shape), torch.cat([each[rank] for each in wanted]))


@given(st.integers(1, 40), st.integers(1, 5), st.data())
def test_units_cover_a_part_or_are_refused(whole: int, unit: int, drawn: st.DataObject) -> None:
    start = drawn.draw(st.integers(0, whole - 1))
    end = drawn.draw(st.integers(start + 1, whole))
    tensor = torch.arange(whole)
    length = Cut(whole, ((start, end),))
    units, inner = covering(length, unit)
    blocks = torch.nn.functional.pad(tensor, (0, -whole % unit)).view(-1, unit)
    assert torch.equal(cut(cut(blocks, (units, unit)).flatten(), (inner,)), tensor[start:end])
    is_aligned = start % unit == 0 and (end % unit == 0 or end == whole)
    assert in_units(length, unit) == (units if is_aligned else None)


def test_a_whole_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint's t is \[5, 2\], its config says \[6, 2\]"):
        check_shape("t", (5, 2), (split(6, 0, 2), 2))
