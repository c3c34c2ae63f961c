"""Sessions that do not stream: which of their requests can be continued, and which are forgotten."""

from contextlib import suppress

import pytest

from roost.errors import RequestError
from roost.messages import Refused, Tokens
from roost.server.request_history import ENDED_MAX, RequestHistory, RunningRequest
from tests.unit.server.test_session_table import ENDED


def sent(
    history: RequestHistory, name: str, new: tuple[int, ...], after: str | None = None, *, replaces: bool = False
) -> RunningRequest:
    """A request that continues another, sent."""
    parent = None if after is None else history.number_of(after, may_run=replaces)
    before = () if after is None else history.find(after, may_run=replaces)
    request = RunningRequest(history, name, (*before, *new), parent=parent, replaces=replaces)
    request.on_sent()
    return request


def ended(request: RunningRequest, *output: int) -> None:
    """It says something and ends."""
    request.on_event(Tokens(request_id="r0", tokens=output))
    request.on_event(ENDED)


def names(history: RequestHistory) -> set[str]:
    """The requests that can be continued, of those that the tests make."""
    found = set()
    for name in ("a", "b", "c", "d", "e"):
        with suppress(RequestError):
            history.find(name)
            found.add(name)
    return found


def test_a_request_that_replaces_forgets_all_that_continued_the_same_request() -> None:
    history = RequestHistory(None)
    ended(sent(history, "a", (1,)), 2)
    ended(sent(history, "b", (3,), after="a"), 4)
    ended(sent(history, "c", (5,), after="b"), 6)
    ended(sent(history, "d", (7,)), 8)
    running = sent(history, "e", (9,), after="c")
    assert history.find("c") == (1, 2, 3, 4, 5, 6) and history.find("c", with_output=False) == (1, 2, 3, 4, 5)
    refused = sent(history, "x", (0,), after="a", replaces=True)
    assert running.is_stopped, "what runs there is in the way, and ends at once"
    refused.on_event(Refused(request_id="x", status=400, message="no"))
    assert names(history) == {"a", "b", "c", "d"}, "one that is refused forgets nothing"
    ended(running, 1)
    assert names(history) == {"a", "b", "c", "d"}, "nobody can continue what was replaced"
    ended(sent(history, "e", (9,), after="a", replaces=True), 5)
    assert names(history) == {"a", "d", "e"}
    assert history.find("e") == (1, 2, 9, 5)
    ended(sent(history, "b", (1,), replaces=True), 2)
    assert names(history) == {"b"}, "without a request to continue, everything is replaced"


def test_a_request_that_runs_can_be_replaced_and_keeps_what_it_has_said() -> None:
    history = RequestHistory(None)
    running = sent(history, "a", (1,))
    running.on_event(Tokens(request_id="r0", tokens=(2, 3)))
    with pytest.raises(RequestError, match="no request 'a' has ended"):
        history.find("a")
    new = sent(history, "b", (4,), after="a", replaces=True)
    assert running.is_stopped and history.find("a") == (1, 2, 3)
    ended(running, 9)
    assert history.find("a") == (1, 2, 3), "what comes later is not heard"
    ended(new, 5)
    assert history.find("b") == (1, 2, 3, 4, 5)
    assert history.idle_s < 60


def test_a_name_may_be_used_again_even_by_what_continues_it() -> None:
    history = RequestHistory(None)
    ended(sent(history, "a", (1,)), 2)
    ended(sent(history, "a", (3,), after="a"), 4)
    ended(sent(history, "b", (5,), after="a"), 6)
    assert history.find("b") == (1, 2, 3, 4, 5, 6)
    ended(sent(history, "c", (7,), after="b", replaces=True), 8)
    assert names(history) == {"a", "b", "c"}
    ended(sent(history, "d", (7,), after="a", replaces=True), 8)
    assert names(history) == {"a", "d"}


@pytest.mark.parametrize("num_ended", [ENDED_MAX - 1, ENDED_MAX, ENDED_MAX + 1, 2 * ENDED_MAX])
def test_the_last_requests_to_end_can_be_continued_and_the_oldest_are_forgotten(num_ended: int) -> None:
    history = RequestHistory(None)
    for number in range(num_ended):
        history.keep(f"r{number}", (number, 1))
    first = max(0, num_ended - ENDED_MAX)
    for number in range(num_ended):
        if number >= first:
            assert history.find(f"r{number}") == (number, 1)
        else:
            with pytest.raises(RequestError, match="no request 'r"):
                history.find(f"r{number}")


def test_a_request_that_ends_again_under_its_name_is_the_newest() -> None:
    history = RequestHistory(None)
    for number in range(ENDED_MAX):
        history.keep(f"r{number}", (number,))
    history.keep("r0", (7,))
    history.keep("another", (8,))
    assert history.find("r0") == (7,)
    with pytest.raises(RequestError, match="no request 'r1'"):
        history.find("r1")
