"""Intake: a bad command gets one clear answer that names the parameter, and costs nobody else anything."""

import pytest

from roost.messages import Abort, CloseSession, Command, Finished, OpenSession, Refused, SessionClosed, Submit
from tests.unit.sched.desk import VOCAB, Desk, desk


def _submit(name: str = "a", tokens: tuple[int, ...] = (1, 2, 3), **more: object) -> Submit:
    return Submit(request_id=name, tokens=tokens, **{"max_new_tokens": 4, **more})  # type: ignore[arg-type]


def _busy() -> Desk:
    """Session s is open and its turn 'first' runs."""
    at = desk()
    at.send(OpenSession(session_id="s", salt="x"))
    at.send(_submit("first", session_id="s", max_new_tokens=20))
    return at


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (_submit(max_new_tokens=-1), 400, ["max_new_tokens", "at least 0", "-1"]),
        (_submit(tokens=()), 400, ["tokens", "at least 1"]),
        (_submit(tokens=(1, VOCAB)), 400, ["tokens", f"[0, {VOCAB - 1}]"]),
        (_submit(tokens=(-1,)), 400, ["tokens", f"[0, {VOCAB - 1}]"]),
        (_submit(stop_token_ids=frozenset([VOCAB])), 400, ["stop_token_ids", f"[0, {VOCAB - 1}]"]),
        (_submit(queue=True), 400, ["queue", "session"]),
        (_submit(session_id="nobody"), 404, ["session_id", "'nobody'"]),
        (_submit("first"), 409, ["request_id", "'first'"]),
        (_submit(session_id="s"), 409, ["session_id", "'s'", "queue: true"]),
        (_submit(session_id="s", queue=True, salt="y"), 400, ["salt"]),
        (_submit(max_new_tokens=62), 413, ["tokens", "3", "62", "--context 64"]),
        (_submit(tokens=(1,) * 65, max_new_tokens=0), 413, ["tokens", "65", "--context 64"]),
        (Abort(request_id="nobody"), 404, ["request_id", "'nobody'"]),
        (OpenSession(session_id="s"), 409, ["session_id", "'s'"]),
        (CloseSession(session_id="nobody"), 404, ["session_id", "'nobody'"]),
    ],
)
def test_a_bad_command_is_refused_and_the_others_go_on(command: Command, status: int, words: list[str]) -> None:
    alone, disturbed = _busy(), _busy()
    answer = disturbed.send(command)
    alone.engine.tick()
    assert [type(event) for event in answer] == [Refused]
    assert isinstance(answer[0], Refused) and answer[0].status == status
    assert [word for word in words if word not in answer[0].message] == []
    alone.run()
    disturbed.run()
    assert [event for event in disturbed.events if event not in answer] == alone.events


def test_a_full_queue_refuses_instead_of_waiting() -> None:
    at = desk(max_running=1, max_queued=2)
    for name in ("a", "b", "c"):
        assert not any(isinstance(event, Refused) for event in at.send(_submit(name, max_new_tokens=30)))
    answer = at.send(_submit("d"))
    assert isinstance(answer[0], Refused) and answer[0].status == 429
    assert "--max-queued 2" in answer[0].message


def test_a_closing_session_takes_no_turn() -> None:
    at = _busy()
    at.engine.post(CloseSession(session_id="s"), at.events.append)
    answer = at.send(_submit("late", session_id="s"))
    assert isinstance(answer[0], Refused) and answer[0].status == 410
    assert SessionClosed(session_id="s") in at.events


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    at = desk()
    at.send(_submit("a"))
    at.run()
    at.send(_submit("a"))
    at.run()
    assert sum(isinstance(event, Finished) for event in at.events) == 2


def test_a_request_that_names_no_limit_is_told_the_one_it_got() -> None:
    at = desk()
    at.send(_submit("a", max_new_tokens=None))
    at.run()
    finished = at.events[-1]
    assert isinstance(finished, Finished) and finished.reason == "length"
    assert finished.max_new_tokens == finished.usage.completion_tokens == 61
