"""Labels: each client has its own, each has a few sessions, and there are only so many."""

from roost.server.labels import LABELS_MAX, SESSIONS_PER_LABEL, Labels


def test_a_label_has_the_sessions_that_were_used_last() -> None:
    labels = Labels()
    for number in range(SESSIONS_PER_LABEL):
        assert labels.use("ann", "work", f"s{number}") == []
    assert labels.use("ann", "work", "s0") == []  # again
    assert labels.use("ann", "work", "new") == [("ann", "s1")]
    assert labels.of("ann", "work") == ["s2", "s3", "s0", "new"]


def test_a_label_is_its_clients_own_and_none_is_no_label() -> None:
    labels = Labels()
    labels.use("ann", "work", "a")
    assert labels.of("bob", "work") == labels.of("ann", "") == labels.of("ann", "other") == []


def test_there_are_so_many_labels_and_the_least_recently_used_goes_first() -> None:
    labels = Labels()
    for number in range(LABELS_MAX):
        assert labels.use("ann", f"l{number}", f"s{number}") == []
    labels.use("ann", "l0", "s0")
    assert labels.use("bob", "one more", "b") == [("ann", "s1")]
    assert labels.of("ann", "l1") == [] and labels.of("ann", "l0") == ["s0"]


def test_a_label_may_be_any_text() -> None:
    labels = Labels()
    for text in ("x" * 10**6, "\ud800", "\0"):
        labels.use("", text, "s")
        assert labels.of("", text) == ["s"]
