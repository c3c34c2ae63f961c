"""Speculation is invisible: with every option, in every mode, outputs are the dense reference's, or it is refused."""

from dataclasses import astuple
from itertools import product
from zlib import crc32

import pytest

from tests.parity.table import COLUMNS, TABLE, written
from tests.support import option_requests as option_asks
from tests.support.option_cases import CASES, CIRCUMSTANCES, OPTIONS, side_by_side
from tests.support.spec_engines import MODES, Setting, setting_of
from tests.support.workload import DEPTHS

pytestmark = pytest.mark.xdist_group("options")  # one process: the cells of a setting share one run of the engine
SPECULATING = pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
# What else a setting can be: sure drafters accept the longest runs, random heads next to nothing.
SETTINGS = [
    Setting(mode=mode, depth=depth, head=head, page_size=page_size, chunk=chunk)
    for mode, depth, head, page_size, chunk in product(
        MODES, (0, 1), ("half", "sure", "eagle", "eagle3"), (1, 4, 16), (5, 512)
    )
    if MODES[mode].pair or head == "half"
]


ONE_IN = 2
DRAWN = [
    pytest.param(option, *column, marks=[] if crc32(f"{option} {column}".encode()) % ONE_IN == 0 else pytest.mark.full)
    for option, column in product(CASES, COLUMNS)
]


@pytest.mark.parametrize(("option", "mode", "depth"), DRAWN)
def test_an_option_is_exact_or_refused(option: str, mode: str, depth: int) -> None:
    CASES[option].check(setting_of(mode, depth))


@DEPTHS
@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("option", option_asks.ASKS)
def test_an_option_is_exact_where_every_draft_is_right(option: str, mode: str, depth: int) -> None:
    OPTIONS[option].check(Setting(mode=mode, depth=depth, head="sure", page_size=1))


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: "-".join(map(str, astuple(each))))
def test_every_option_is_exact_with_any_head_and_page_size(setting: Setting) -> None:
    failed = {}
    for option, case in {**OPTIONS, **CIRCUMSTANCES}.items():
        try:
            case.check(setting)
        except AssertionError as error:
            failed[option] = str(error)
    assert failed == {}


@DEPTHS
def test_accepted_paths_of_trees_are_moved_to_the_front(depth: int) -> None:
    assert side_by_side(Setting(mode="tree", depth=depth)).num_moved > 50


@DEPTHS
@SPECULATING
@pytest.mark.parametrize("option", ["stop", "stop_token_ids", "max_new_tokens"])
def test_outputs_end_inside_accepted_runs(option: str, mode: str, depth: int) -> None:
    assert side_by_side(Setting(mode=mode, depth=depth)).num_overshot(option_asks.of(option)) > 0


@DEPTHS
@SPECULATING
def test_sampled_tokens_are_accepted(mode: str, depth: int) -> None:
    served = side_by_side(Setting(mode=mode, depth=depth))
    drawn = [each for each in option_asks.asked() if each.sampling.temperature >= 0.5 and not each.sampling.greedy]
    assert sum(served.num_accepted([each]) > 0 for each in drawn) > len(drawn) / 3
    penalised = [each for each in option_asks.asked() if each.sampling.penalises]
    assert served.num_accepted(penalised) > 10


def test_the_committed_table_lists_these_options() -> None:
    cells = {
        (option, *column): "refused" if case.refused else "exact"
        for option, case in CASES.items()
        for column in COLUMNS
    }
    assert TABLE.read_text() == written(cells), "run `make table`"
