"""Order: by priority, then by arrival, in the queue, in a step, and when pages run short."""

from roost.messages import Finished, OpenSession, Submit, Tokens
from tests.support.engine_client import EngineClientDouble, Recorder, engine_client, resolved


def _submit(name: str, priority: int = 0, tokens: int = 5, max_new_tokens: int = 3) -> Submit:
    first = sum(map(ord, name)) % 50
    return Submit(
        request_id=name, tokens=(first,) + (1,) * (tokens - 1), max_new_tokens=max_new_tokens, priority=priority
    )


def _post(at: EngineClientDouble, *submits: Submit) -> None:
    for submit in submits:
        at.engine.post(submit, at.events.append)


def _ended(at: EngineClientDouble) -> list[str]:
    return [event.request_id for event in at.events if isinstance(event, Finished)]


def test_the_queue_is_served_by_priority_and_then_in_the_order_of_arrival() -> None:
    at = engine_client(max_running=1, max_queued=9)
    at.send(_submit("runs"))
    _post(at, _submit("a"), _submit("low", -1), _submit("high", 2), _submit("b"), _submit("higher", 3))
    at.run()
    assert _ended(at) == ["runs", "higher", "high", "a", "b", "low"]


def test_a_running_request_is_not_stopped_for_one_that_queues_with_more_priority() -> None:
    at = engine_client(max_running=1)
    at.send(_submit("runs", max_new_tokens=20))
    _post(at, _submit("high", 5))
    at.run()
    assert _ended(at) == ["runs", "high"] and at.engine.state.totals.preemptions == 0


def test_a_step_has_its_rows_in_order_and_gives_the_prefill_budget_to_the_first() -> None:
    recorder = Recorder(resolved(chunk=8))
    at = engine_client(recorder, chunk=8)
    _post(at, _submit("low", -1, tokens=12), _submit("high", 1, tokens=12))
    at.tick()
    (row,) = recorder.plans[0].rows.tolist()
    assert row == at.engine.state.requests["high"].row
    at.run()
    first = next(event.request_id for event in at.events if isinstance(event, Tokens))
    assert first == "high"


def test_pages_run_short_for_the_last_in_line_not_for_the_newest() -> None:
    # two sequences of 6 pages in a pool of 9: each starts with 3
    at = engine_client(num_pages=9, max_running=2)
    _post(at, _submit("low", -1, tokens=9, max_new_tokens=16), _submit("high", 1, tokens=9, max_new_tokens=16))
    at.run()
    preempted = {subject for kind, subject, _ in at.engine.state.trace.last() if kind == "preempt"}
    assert preempted == {"low"} and _ended(at) == ["high", "low"]


def test_a_preempted_request_keeps_its_place_among_its_equals() -> None:
    at = engine_client(num_pages=9, max_running=2, max_queued=9)
    _post(at, _submit("first", tokens=9, max_new_tokens=16), _submit("second", tokens=9, max_new_tokens=16))
    for name in ("third", "fourth"):
        _post(at, _submit(name, tokens=9, max_new_tokens=1))
    at.run()
    started = [subject for kind, subject, _ in at.engine.state.trace.last() if kind == "admit"]
    assert started == ["first", "second", "second", "third", "fourth"]


def test_the_head_of_the_queue_starts_when_a_session_that_became_idle_makes_room() -> None:
    at = engine_client(num_pages=6)
    at.send(OpenSession(session_id="s"))
    at.send(Submit(request_id="before", tokens=(9,), max_new_tokens=0, session_id="s"))
    at.run()
    turn = Submit(
        request_id="turn", tokens=(8, 7, 6, 5), max_new_tokens=1, session_id="s"
    )  # only a first one is shared
    _post(at, turn, _submit("long", tokens=3, max_new_tokens=10), _submit("head", tokens=8, max_new_tokens=1))
    at.run()
    assert _ended(at) == ["before", "turn", "head", "long"]
