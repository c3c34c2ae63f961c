"""The team: every record is done once, in order, by whoever is there, however many sleep or never come."""

import threading

import numpy as np
import pytest

from roost.numba_kernels import program, rows
from roost.numba_kernels.records import NUM_FIELDS
from roost.numba_kernels.team import Team

LENGTH = 40


class Sums:
    """A program that adds 1 to each number of some rows, as often as it has records."""

    def __init__(self, num_rows: int, num_records: int) -> None:
        self.numbers = np.zeros((num_rows, LENGTH), dtype=np.float32)
        self._ones = np.ones((num_rows, LENGTH), dtype=np.float32)
        self._count = np.array([num_rows])
        self.records = np.zeros((num_records, NUM_FIELDS), dtype=np.int64)
        for field, value in {
            0: program.ADD,
            rows.NUM_TOKENS: self._count.ctypes.data,
            rows.LENGTH: LENGTH,
            rows.SOURCE: self.numbers.ctypes.data,
            rows.SOURCE_STRIDE: LENGTH,
            rows.TARGET: self.numbers.ctypes.data,
            rows.TARGET_STRIDE: LENGTH,
            rows.OTHER: self._ones.ctypes.data,
            rows.OTHER_STRIDE: LENGTH,
        }.items():
            self.records[:, field] = value

    def skip(self, numbers: slice) -> None:
        """Let some records have no rows, and so no pieces."""
        self._none = np.array([0])
        self.records[numbers, rows.NUM_TOKENS] = self._none.ctypes.data


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_piece_of_every_record_is_done_once(size: int) -> None:
    team = Team(size)
    for num_rows, num_records in ((1, 1), (7, 3), (64, 50)):
        sums = Sums(num_rows, num_records)
        for times in range(1, 4):
            team.run(sums.records)
            assert (sums.numbers == times * num_records).all()
    team.close()


@pytest.mark.parametrize("size", [2, 4])
def test_records_of_few_and_of_many_pieces_may_follow_one_another(size: int) -> None:
    team, few, many = Team(size), Sums(1, 40), Sums(64, 40)
    mixed = np.empty((80, NUM_FIELDS), dtype=np.int64)
    mixed[0::2], mixed[1::2] = few.records, many.records
    for times in range(1, 500):
        team.run(mixed)
        assert (few.numbers == 40 * times).all() and (many.numbers == 40 * times).all()
    team.close()


def test_records_without_pieces_are_passed_over() -> None:
    team = Team(2)
    for skipped in (slice(0, 1), slice(3, 6), slice(5, 6), slice(0, 6)):
        sums = Sums(4, 6)
        sums.skip(skipped)
        team.run(sums.records)
        assert (sums.numbers == 6 - len(range(6)[skipped])).all()
    team.run(np.zeros((0, NUM_FIELDS), dtype=np.int64))
    team.close()


def test_who_never_comes_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)  # the other members are never there
    team, sums = Team(4), Sums(64, 50)
    team.run(sums.records)
    assert (sums.numbers == 50).all()


def test_members_that_sleep_are_woken_and_end_when_the_team_does() -> None:
    team, sums = Team(3), Sums(64, 50)
    members = [each for each in threading.enumerate() if each.name.startswith("numba-") and each.is_alive()][-2:]
    for times in range(1, 4):
        for member in team._wake[1:]:  # all that were woken before have gone back to sleep, or will do without harm
            member.release()
        team.run(sums.records)
        assert (sums.numbers == 50 * times).all()
    team.close()
    for member in members:
        member.join(timeout=60)
        assert not member.is_alive()
