"""Labels: each client has its own, each has a few sessions, and there are only so many."""

from roost.server.labels import LABELS_MAX, SESSIONS_PER_LABEL, Labels
from roost.server.session_uses import SessionUses


class Scene:
    """Labels, and the sessions that nobody uses any more."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, str]] = []
        self.uses = SessionUses(lambda *session: self.closed.append(session))
        self.labels = Labels(self.uses)


def test_a_label_has_the_sessions_that_were_used_last() -> None:
    scene = Scene()
    for number in range(SESSIONS_PER_LABEL):
        scene.labels.use("ann", "work", f"s{number}")
    scene.labels.use("ann", "work", "s0")  # again
    assert scene.closed == []
    scene.labels.use("ann", "work", "new")
    assert scene.closed == [("ann", "s1")] and scene.labels.of("ann", "work") == ["s2", "s3", "s0", "new"]


def test_a_session_that_a_turn_uses_is_not_closed_with_its_label() -> None:
    scene = Scene()
    scene.labels.use("ann", "work", "s0")
    scene.uses.add(("ann", "s0"))
    for number in range(SESSIONS_PER_LABEL):
        scene.labels.use("ann", "work", f"t{number}")
    assert scene.closed == []
    scene.uses.drop(("ann", "s0"))
    assert scene.closed == [("ann", "s0")]


def test_a_label_is_its_clients_own_and_none_is_no_label() -> None:
    labels = Scene().labels
    labels.use("ann", "work", "a")
    assert labels.of("bob", "work") == labels.of("ann", "") == labels.of("ann", "other") == []


def test_there_are_so_many_labels_and_the_least_recently_used_goes_first() -> None:
    scene = Scene()
    for number in range(LABELS_MAX):
        scene.labels.use("ann", f"l{number}", f"s{number}")
    scene.labels.use("ann", "l0", "s0")
    assert scene.closed == []
    scene.labels.use("bob", "one more", "b")
    assert scene.closed == [("ann", "s1")]
    assert scene.labels.of("ann", "l1") == [] and scene.labels.of("ann", "l0") == ["s0"]


def test_a_label_may_be_any_text() -> None:
    labels = Scene().labels
    for text in ("x" * 10**6, "\ud800", "\0"):
        labels.use("", text, "s")
        assert labels.of("", text) == ["s"]
