"""What is looked up, and how much of it, for each round: where it is worth more than what the head drafts."""

import pytest

from roost.draft_length.choice import DraftLengthPolicy
from roost.draft_length.costs import Costs
from roost.draft_length.lookups import Repeat, RowDrafts
from roost.spec_shape import MATCH_MAX, SpecShape
from roost.spec_widths import Widths
from roost.step import StepId
from roost.step_times.times import StepTimes
from tests.support.spec_configs import AUTO_JOINT, AUTO_NGRAM
from tests.unit.draft_length.test_lookups import DRAFTS, learned

MENU = (1, 2, 3, 4, 5, 7, 9, 17)
CHEAP, DEAR = 2, 500  # what a node more costs, of a step of 1000
LENGTHS = range(1, MATCH_MAX + 1)


def policy_of(
    shape: SpecShape = AUTO_JOINT, *, narrows: bool = True, limit: int | None = None, depth: int = 1
) -> DraftLengthPolicy:
    """One that has seen nothing."""
    is_auto = shape.tokens == 17
    widths = Widths(shape=shape, is_auto=is_auto, limit=limit, narrows=narrows)
    return DraftLengthPolicy(widths, 64, StepTimes(64, depth))


def measured(policy: DraftLengthPolicy, node_cost: int, num_rounds: int = 1, draft_cost: int = 100) -> None:
    """Have steps of every width been timed, and of rounds that are all looked up: without the head."""
    for _ in range(2):
        for width in MENU:
            for _ in range(5):
                time = 1000 + node_cost * (width - 1)
                policy._costs.note(num_rounds, width, time + draft_cost * min(width - 1, 6))
                policy._costs.note(num_rounds, 1 if width == 1 else -width, time)


def row_of(policy: DraftLengthPolicy, num_right: dict[int, int], head_right: int | None = None) -> RowDrafts:
    """A row in which so many drafts were right after matches of some lengths, and of the head's beside them."""
    row = RowDrafts()
    for match_len, right in num_right.items():
        learned(policy.lookups, row, match_len, right, num_rounds=200)
        drafts = [*DRAFTS[:right], *[1] * len(DRAFTS)]
        for _ in range(0 if head_right is None else 200):
            row.repeat_len = 0
            policy.lookups.note(row, match_len, drafts, DRAFTS[: (head_right or 0) + 1], 6)
    row.repeat_len = 0
    return row


def table_of(policy: DraftLengthPolicy, row: RowDrafts, width: int = 4, widest: int = 17) -> list[int]:
    """What is looked up for one round; asking again gives the same answer."""
    (found,) = policy.lookup_widths([row], width, [widest])
    assert policy.lookup_widths([row], width, [widest]) == [found]
    assert len(found) == MATCH_MAX + 1 and found[0] == 0, "nothing was found: nothing is looked up"
    return found


@pytest.mark.parametrize("narrows", [True, False])
def test_without_rounds_nothing_is_decided(narrows: bool) -> None:
    assert policy_of(narrows=narrows).lookup_widths([], 4, []) == []


def test_where_rounds_are_not_narrowed_a_lookup_goes_first_where_it_is_better_than_the_head() -> None:
    policy = policy_of(narrows=False)
    row = row_of(policy, {2: 0, 4: 12}, head_right=1)
    assert [table_of(policy, row, widest=9)[length] for length in (2, 4)] == [0, 9]
    better = policy_of(narrows=False)
    sure_head = row_of(better, {2: 0, 4: 2}, head_right=6)
    assert table_of(better, sure_head, widest=9)[4] == 0


def test_without_a_head_whatever_was_found_is_better_than_nothing() -> None:
    policy = policy_of(SpecShape(steps=3, topk=1, tokens=4, reads_history=True), narrows=False)
    assert table_of(policy, RowDrafts(), 4, 4)[1:] == [4] * MATCH_MAX


def test_rounds_that_are_narrowed_have_a_width_of_the_menu_and_none_where_nothing_is_worth_it() -> None:
    policy = policy_of()
    measured(policy, CHEAP)
    sure, unsure = row_of(policy, {4: 15}), row_of(policy, {4: 0}, head_right=6)
    found = table_of(policy, sure)
    assert set(found) <= {0, *MENU[1:]} and found[4] == 17
    assert table_of(policy, unsure)[4] == 0


@pytest.mark.parametrize("num_right", [1, 2, 4, 15])
def test_the_surer_a_lookup_and_the_cheaper_a_node_the_more_is_looked_up(num_right: int) -> None:
    widths = []
    for node_cost in (CHEAP, 60, DEAR):
        policy = policy_of(AUTO_NGRAM)
        measured(policy, node_cost)
        row = row_of(policy, {3: num_right})
        widths.append(table_of(policy, row, width=1)[3])
    assert widths == sorted(widths, reverse=True)
    assert (widths[0], widths[-1]) == {1: (2, 2), 2: (9, 2), 4: (17, 4), 15: (17, 9)}[num_right]


def test_rows_are_decided_for_each_by_itself() -> None:
    policy = policy_of()
    measured(policy, CHEAP, num_rounds=4)
    rows = [row_of(policy, {4: right}, head_right=2) for right in (15, 0, 15)] + [RowDrafts()]
    together = policy.lookup_widths(rows, 4, [17] * 4)
    assert together[0][4] > 4 and together[1][4] == 0 and together[2] == together[0]


def test_above_the_limit_nothing_is_looked_up() -> None:
    policy = policy_of(limit=1)
    row = row_of(policy, {4: 15})
    assert policy.lookup_widths([row, row], 1, [1, 1]) == [[0] * (MATCH_MAX + 1)] * 2


def test_a_row_that_repeats_a_text_goes_by_how_long_it_has() -> None:
    policy = policy_of()
    measured(policy, CHEAP)
    row = row_of(policy, {MATCH_MAX: 0}, head_right=2)
    alone = table_of(policy, row)[MATCH_MAX]
    row.repeat_len = 40
    assert table_of(policy, row)[MATCH_MAX] > alone


def test_where_everything_is_looked_up_and_rounds_are_narrowed_others_are_a_root_alone() -> None:
    policy = policy_of(AUTO_NGRAM)
    assert policy.choose(1, has_prefill=False) == policy.choose(8, has_prefill=True) == 1
    assert policy_of(AUTO_NGRAM, narrows=False).choose(1, has_prefill=False) > 1


# --- wider rounds, where all have their width before anything is drafted ------------------------------------------


def repeats(*shares: float, unknown_len: int = 0) -> list[Repeat]:
    """Rows that repeat a text as surely as that."""
    return [Repeat((share, share), unknown_len) for share in shares]


def captured(node_cost: int = CHEAP, num_rounds: int = 4) -> DraftLengthPolicy:
    """One for a device that replays steps, which was timed."""
    policy = policy_of(narrows=False)
    measured(policy, node_cost, num_rounds)
    return policy


def test_rounds_of_rows_that_repeat_a_text_are_wider() -> None:
    width, which = captured().widen(4, 5, repeats(0.4, 0.99, 0.999))
    assert (width, sorted(which)) == (17, [1, 2])


@pytest.mark.parametrize(
    ("num_rounds", "width", "sure"), [(4, 1, 0.99), (4, 5, 0.3), (40, 4, 0.99)], ids=["no drafts", "unsure", "many"]
)
def test_nobodys_round_is_wider_where_it_brings_nothing(num_rounds: int, width: int, sure: float) -> None:
    assert captured(num_rounds=num_rounds).widen(num_rounds, width, repeats(sure)) == (width, [])
    assert captured().widen(4, 5, []) == (5, [])
    assert captured(DEAR).widen(4, 5, repeats(0.8)) == (5, [])


def test_what_is_in_flight_may_have_ended_the_repeat() -> None:
    policy = captured(60)
    assert policy.widen(4, 5, repeats(0.97))[1] == [0]
    assert policy.widen(4, 5, repeats(0.97, unknown_len=90)) == (5, [])


def test_a_row_in_flight_repeats_what_it_was_last_seen_to() -> None:
    policy, row = policy_of(narrows=False), RowDrafts()
    policy.lookups.note(row, 8, DRAFTS, DRAFTS, 0)
    assert policy.repeat(row, 5) == Repeat(policy.lookups.lookup_share(row, row.repeat_len), 5)


# --- what steps without the head cost --------------------------------------------------------------------------


def test_rounds_whose_drafts_are_all_looked_up_cost_no_draft_passes() -> None:
    costs = Costs([1, 2, 4])
    dear, cheap = costs.of(1, (7, -7), has_chunks=False)
    assert cheap < dear
    for _ in range(5):
        for width, time in ((1, 1000), (5, 1900), (-5, 1080)):
            costs.note(1, width, time)
    one, drafted, looked_up = costs.of(1, (1, 5, -5), has_chunks=False)
    assert drafted / one == pytest.approx(1.9, rel=0.1) and looked_up / one == pytest.approx(1.08, rel=0.1)
    assert costs.num_samples(1, (5, -5, -7), has_chunks=False)[2] == 0


def test_what_was_not_measured_is_guessed_from_its_like() -> None:
    costs = Costs([1])
    for _ in range(5):
        for width, time in ((1, 1000), (4, 3000), (-4, 1100)):
            costs.note(1, width, time)
    drafted, looked_up = costs.of(1, (5, -5), has_chunks=False)
    assert looked_up < 1.5
    assert drafted > 2.5


def ran(policy: DraftLengthPolicy, times: list[int], *more: object, num_rounds: int = 1, width: int = 5) -> None:
    """Steps of rounds alone that took so long, each planned when the one before was collected, none in flight."""
    now, before = policy._times._collected_at or 0, policy._num_steps
    for number, time in enumerate(times):
        step = StepId(before + number)
        policy._times.planned(step, num_rounds, width, 0, num_out=0, now=now)
        policy.planned(num_rounds, width)
        now += time
        policy.collected(policy._times.collected(step, now), *more)  # type: ignore[arg-type]


def test_a_step_teaches_what_its_own_rounds_bring_and_cost() -> None:
    policy = policy_of(depth=0)
    measured(policy, CHEAP)
    before = policy.tokens_of(5), *policy.costs_of(1, (5, -17))
    ran(policy, [2068] * 40, [], [(17, 3)])  # all looked up, and twice as dear as it was
    tokens, drafted, looked_up = policy.tokens_of(5), *policy.costs_of(1, (5, -17))
    assert tokens == pytest.approx(before[0], rel=0.2), "the head's drafts were not there to be judged"
    assert (drafted, looked_up) == before[1:], "the same machine, busier than it was"
    assert policy._costs.num_samples(1, (-17,), has_chunks=False)[0] > 0
    ran(policy, [2068] * 40, [1])
    assert policy.tokens_of(5) < 1.5 < before[0]


def test_where_rounds_are_not_narrowed_a_step_costs_the_same_whoever_drafted_for_it() -> None:
    policy = policy_of(narrows=False, depth=0)
    ran(policy, [1000] * 5, [1], width=1)
    ran(policy, [2000] * 5, [], [(5, 3)])
    one, five = policy.costs_of(1, (1, 5))
    assert five / one == pytest.approx(2, rel=0.1)
    ran(policy, [4000] * 5, [], [(17, 3)], [17])
    assert policy.costs_of(1, (17,))[0] / one == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("extra", [0, 3000])
def test_what_steps_of_several_widths_cost_beyond_their_nodes_is_measured_and_forgotten(extra: int) -> None:
    policy = policy_of(narrows=False, depth=0)
    ran(policy, [1000] * 5, [1] * 4, num_rounds=4, width=1)
    for width in (5, 9, 17):
        ran(policy, [1000 + 20 * width] * 5, [3] * 4, [], [width] * 4 * (width > 5), num_rounds=4)
    wide = policy.widen(4, 5, repeats(0.99, 0.9))
    assert wide[0] > 5 and 0 in wide[1], "nobody knows yet what it costs"
    before = policy.costs_of(4, (1, 5, 9, 17))
    ran(policy, [1100 + extra] * 9, [3] * 3, [], [9], num_rounds=4)
    assert (policy.widen(4, 5, repeats(0.99, 0.9))[1] == []) == (extra > 0)
    assert policy.costs_of(4, (1, 5, 9, 17)) == before, "even steps cost what they did"
    sure = policy.widen(4, 5, repeats(*[0.999] * 4))
    assert (sure[0] > 5, len(sure[1])) == (True, 4), "a step of one width costs no more"
    ran(policy, [1100] * 600, [3] * 4, num_rounds=4)
    assert policy.widen(4, 5, repeats(0.99, 0.9))[1], "by now it may be otherwise"


@pytest.mark.parametrize(("node_cost", "is_worth_it"), [(20, True), (90, False)])
def test_what_a_step_without_drafts_takes_is_looked_at_where_all_have_them(node_cost: int, is_worth_it: bool) -> None:
    policy = policy_of(depth=0)
    widths = []
    for number in range(800):
        width = policy.choose(8, has_prefill=False)
        widths.append(width)
        # of each round the first draft is right in three of five; a width costs its nodes, whatever was assumed
        accept_lens = [1 + (width > 1 and (number + row) % 5 < 3) for row in range(8)]
        ran(policy, [1000 + node_cost * 8 * (width - 1)], accept_lens, num_rounds=8, width=width)
    late = widths[400:]
    if is_worth_it:
        assert 1 <= late.count(1) <= len(late) // 50, "now and then, and no more"
    else:
        assert late.count(1) >= 0.95 * len(late)
