"""The page of failure modes is complete: every mode has a test, every number in a test means one, the table is true."""

from tests.tidy.modes import PAGE, counted, described, planted, written


def test_every_failure_mode_is_described_once_and_has_a_test() -> None:
    assert described() == list(range(1, len(described()) + 1))
    assert sorted(set(described()) - set(counted())) == [], "failure modes without a test"


def test_every_number_of_a_test_or_planted_bug_is_a_failure_mode() -> None:
    assert sorted((set(counted()) | set(planted())) - set(described())) == []


def test_the_table_of_failure_modes_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == written(), "run `make modes`"
