"""Nobody is kept waiting, cut off or ended by somebody else."""

import pytest

from roost.messages import Abort, Event, Finished, OpenSession, Refused, Submit, Tokens
from tests.sim.script import CHAIN, Script, Setting, prompt_of
from tests.support.engine_client import engine_client


def _submit(name: str, max_new_tokens: int, session_id: str | None = None, queue: bool = False) -> Submit:
    return Submit(request_id=name, tokens=(1, 2, 3), max_new_tokens=max_new_tokens, session_id=session_id, queue=queue)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_stream_of_short_requests_does_not_keep_a_long_answer_waiting(mixed: bool) -> None:
    at = engine_client(mixed=mixed)
    ended: list[str] = []

    def reply(event: Event) -> None:
        if isinstance(event, Finished):
            ended.append(event.request_id)

    at.engine.post(_submit("long", 20), reply)
    for i in range(60):
        at.engine.post(_submit(f"short{i}", 1), reply)
        at.engine.tick()
    assert "long" in ended


@pytest.mark.parametrize("breaks_at", [Tokens, Finished])
def test_a_client_that_cannot_be_told_ends_alone(breaks_at: type) -> None:
    at, told = engine_client(), list[Event]()

    def raises(event: Event) -> None:
        told.append(event)
        if isinstance(event, breaks_at):
            raise ConnectionError("gone")

    at.engine.post(_submit("gone", 9), raises)
    at.engine.post(_submit("here", 9), at.events.append)
    at.run()
    finished = [event for event in at.events if isinstance(event, Finished)]
    assert [(event.request_id, event.reason) for event in finished] == [("here", "length")]
    assert isinstance(told[-1], breaks_at)  # and nothing after it


def test_only_the_first_turn_behind_an_aborted_one_waits_unasked() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("first", 30, "s"))
    at.engine.post(Abort(request_id="first"), at.events.append)
    for name in ("second", "third"):
        at.engine.post(_submit(name, 2, "s"), at.events.append)
    at.run()
    refused = [event for event in at.events if isinstance(event, Refused)]
    assert [(event.request_id, event.status) for event in refused] == [("third", 409)]
    assert [event.reason for event in at.events if isinstance(event, Finished)] == ["abort", "length"]


def test_a_stopping_engine_takes_nothing_new_and_says_so() -> None:
    at = engine_client()
    at.send(_submit("before", 5))
    at.engine.stop()
    answer = at.send(_submit("after", 5))
    assert isinstance(answer[0], Refused) and answer[0].status == 503
    at.run()
    assert [event.request_id for event in at.events if isinstance(event, Finished)] == ["before"]


@pytest.mark.parametrize("chunk", [64, 16, 12, 3, 1])
def test_rounds_take_no_tokens_from_prefill_however_many_there_are(chunk: int) -> None:
    script = Script(Setting(spec=CHAIN, chunk=chunk, num_pages=200, draft_skill=0))
    for salt in range(3):
        script.submit(prompt_of(2, salt), 90)
        script.tick(4)
    script.submit(prompt_of(80, 3), 1)
    script.run()
    mixed = [len(plan.tokens) for plan in script.watch.plans if plan.is_prefill.sum() == 1 and len(plan.rows) == 4]
    assert len(mixed) > 1 and set(mixed[:-1]) == {chunk} and 0 < mixed[-1] <= chunk
