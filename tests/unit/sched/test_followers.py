"""Followers: requests with one prompt start when the first of them has shared it, or will not share it any more."""

import pytest

from roost.messages import Abort, CloseSession, OpenSession, Refused, Submit, Tokens
from roost.sched.request import Mark
from tests.support.engine_client import EngineClientDouble, Recorder, engine_client, resolved

PROMPT = tuple(range(1, 14))  # three whole pages and one token


def _submit(name: str, leader: str | None = None, **more: object) -> Submit:
    base = {"tokens": PROMPT, "max_new_tokens": 4, "shares_with": leader, **more}
    return Submit(request_id=name, **base)  # type: ignore[arg-type]


def _group(at: EngineClientDouble, **leader: object) -> None:
    at.engine.post(_submit("leader", **leader), at.events.append)
    for name in ("second", "third"):
        at.engine.post(_submit(name, "leader"), at.events.append)


def _starts(at: EngineClientDouble) -> list[tuple[str, int]]:
    """Who was admitted, in order, and how much it found in place."""
    return [(name, numbers[0]) for kind, name, numbers in at.engine.state.trace.last() if kind == "admit"]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [3, 64])
def test_followers_start_after_the_leaders_first_token_and_share_its_pages(overlap: bool, chunk: int) -> None:
    at = engine_client(overlap=overlap, chunk=chunk)
    _group(at)
    while not at.output("leader"):
        assert [name for name, _ in _starts(at)] in ([], ["leader"])
        at.tick()
    at.run()
    assert _starts(at) == [("leader", 0), ("second", 12), ("third", 12)]
    assert at.finished("third").usage.cached_tokens == 12
    assert at.output("second") == at.output("third") == at.output("leader")


@pytest.mark.parametrize("limit", [0, 1])
def test_followers_start_when_the_leader_ends_with_its_prompt(limit: int) -> None:
    at = engine_client()
    _group(at, max_new_tokens=limit)
    at.run()
    assert _starts(at) == [("leader", 0), ("second", 12), ("third", 12)]
    assert at.finished("second").reason == at.finished("third").reason == "length"


def test_followers_of_a_leader_that_stops_at_its_first_token_start() -> None:
    at = engine_client()
    _group(at, stop_token_ids=frozenset(range(50)))
    at.run()
    assert at.finished("leader").reason == "stop" and at.finished("third").reason == "length"


def test_followers_of_a_leader_that_is_aborted_start_without_it() -> None:
    at = engine_client(chunk=2)
    _group(at)
    at.send(Abort(request_id="leader"))
    at.run()
    assert at.finished("leader").reason == "abort"
    assert at.finished("second").reason == at.finished("third").reason == "length"


def test_followers_wait_on_while_their_leader_is_preempted() -> None:
    at = engine_client(chunk=4)
    _group(at)
    at.tick(2)
    at.engine.state.mark(at.engine.state.requests["leader"], Mark.PREEMPT)
    at.run()
    names = [name for name, _ in _starts(at)]
    assert names == ["leader", "leader", "second", "third"]


def test_followers_wait_on_while_a_step_of_their_leader_is_tried_again() -> None:
    at = engine_client(Recorder(resolved(), frozenset([0])))
    _group(at)
    at.run()
    assert [name for name, _ in _starts(at)] == ["leader", "leader", "second", "third"]


def test_followers_of_a_leader_that_ends_with_an_error_start() -> None:
    at = engine_client(Recorder(resolved(), frozenset(range(8))))  # its prompt is cut down to a token first
    _group(at)
    at.run()
    assert at.finished("leader").reason == "error" and at.finished("third").reason == "length"


@pytest.mark.parametrize("leader", ["nobody", "refused", "itself"])
def test_a_request_with_nobody_to_follow_starts_at_once(leader: str) -> None:
    at = engine_client()
    refused = at.send(_submit("refused", max_new_tokens=1000))
    assert isinstance(refused[0], Refused)
    at.send(_submit("itself", leader))
    assert at.engine.state.requests["itself"].row is not None
    at.run()
    assert at.finished("itself").reason == "length"


def test_a_request_that_comes_after_its_leaders_first_token_does_not_wait() -> None:
    at = engine_client()
    at.send(_submit("leader", max_new_tokens=20))
    at.tick(3)
    at.send(_submit("second", "leader"))
    assert _starts(at)[-1] == ("second", 12)


def test_a_follower_may_be_aborted_while_it_waits() -> None:
    at = engine_client(chunk=2)
    _group(at)
    at.tick()
    at.send(Abort(request_id="second"))
    assert at.finished("second").reason == "abort" and at.engine.state.requests["leader"].followers
    at.run()
    assert at.finished("third").reason == "length"


def test_a_follower_that_can_never_fit_is_refused_and_the_others_are_served() -> None:
    at = engine_client(chunk=2)
    _group(at)
    answer = at.send(_submit("long", "leader", max_new_tokens=60))
    assert isinstance(answer[0], Refused) and answer[0].status == 413
    at.run()
    assert at.finished("third").reason == "length"


def test_followers_of_followers_are_served() -> None:
    at = engine_client(chunk=2)
    _group(at)
    at.send(_submit("fourth", "third"))
    at.run()
    assert at.finished("fourth").reason == "length"


def test_followers_of_a_turn_that_waited_in_vain_start() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("turn", session_id="s", max_new_tokens=30))
    at.send(_submit("leader", session_id="s", queue=True))
    at.send(_submit("second", "leader"))
    at.send(CloseSession(session_id="s"))
    at.run()
    assert isinstance(at.end("leader"), Refused) and at.finished("second").reason == "length"


def test_followers_of_a_sessions_turn_start_at_its_first_token() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("leader", session_id="s", max_new_tokens=20))
    at.send(_submit("second", "leader", max_new_tokens=1))
    at.run()
    order = [event.request_id for event in at.events if isinstance(event, Tokens)]
    assert order.index("second") < len(order) - 1 and order[0] == "leader" and order[-1] == "leader"


def test_a_turn_of_a_session_cannot_follow() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("leader"))
    answer = at.send(_submit("turn", "leader", session_id="s"))
    assert isinstance(answer[0], Refused) and (answer[0].status, answer[0].param) == (400, "n")


def test_followers_count_against_the_queue() -> None:
    at = engine_client(chunk=1, max_queued=2)
    at.send(_submit("leader"))
    for name in ("second", "third"):
        assert at.send(_submit(name, "leader")) == []
    answer = at.send(_submit("fourth", "leader"))
    assert isinstance(answer[0], Refused) and answer[0].status == 429
