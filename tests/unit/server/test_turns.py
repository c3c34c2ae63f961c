"""Sessions that only the server knows: how long they live, with a clock that the test sets."""

import pytest

from roost.messages import Finished, SpecStats, Tokens, Usage
from roost.server import turns
from roost.server.turns import Branch, Branches, Conversation, Conversations

ENDED = Finished(
    request_id="r0",
    reason="length",
    usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
    max_new_tokens=1,
    spec=SpecStats(),
)


class Clock:
    """A time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns, "time", clock)
    return clock


def test_a_session_that_does_not_stream_lives_while_it_is_used(clock: Clock) -> None:
    conversations = Conversations()
    conversations.open(Conversation("a", branches=Branches(10)))
    conversations.open(Conversation("b", branches=Branches(None)))
    conversations.open(Conversation("c"))
    branches = conversations.find("a").branches
    assert branches is not None
    clock.now += 9
    request = Branch(branches, "r0", (1,))
    request.began()
    clock.now += 60
    request.saw(Tokens(request_id="r0", tokens=(2,)))
    assert conversations.overdue() == [] and branches.idle_s == 0, "no request is too long for it"
    request.saw(ENDED)
    clock.now += 9
    assert conversations.overdue() == [] and branches.idle_s == 9
    assert branches.find("r0") == (1, 2)
    clock.now += 11
    first = conversations.find("a")
    assert conversations.overdue() == [first], "the others have all the time"
    conversations.open(Conversation("a"))
    conversations.forget(first)
    assert conversations.overdue() == [] and conversations.find("a") is not first, "another has its name now"


def test_looking_for_sessions_that_are_gone_costs_each_opening_the_same() -> None:
    conversations, num_looks = Conversations(), 0
    for number in range(5000):
        if conversations.are_many:
            num_looks += 1
            before = conversations.snapshot()
            conversations.forget_missing(before, {each.key for each in before})
        conversations.open(Conversation(str(number)))
    assert 0 < num_looks < 10
    conversations.forget_missing(conversations.snapshot(), {("", "0")})
    assert [each.id for each in conversations.snapshot()] == ["0"]
