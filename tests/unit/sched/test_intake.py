"""Intake: a bad command gets one clear answer that names the parameter, and costs nobody else anything."""

import pytest

from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    FlushCache,
    ForkSession,
    GetSession,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    Submit,
)
from roost.sampling.params import SamplingParams
from roost.sched.intake import (
    LOGPROBS_MAX,
    PRIORITY_MAX,
    STOP_IDS_MAX,
    STOP_LEN_MAX,
    STOPS_MAX,
    TIMEOUT_MS_MAX,
    handle_command,
)
from roost.sched.sessions import ID_LEN_MAX, TOKENS_MAX, TTL_MS_MAX
from roost.sched.state import State
from tests.support.engine_client import VOCAB, EngineClientDouble, engine_client


def _submit(name: str = "a", tokens: tuple[int, ...] = (1, 2, 3), **more: object) -> Submit:
    return Submit(request_id=name, tokens=tokens, **{"max_new_tokens": 4, **more})  # type: ignore[arg-type]


def _busy() -> EngineClientDouble:
    """Session s is open and its turn 'first' runs."""
    at = engine_client()
    at.send(OpenSession(session_id="s", cache_salt="x"))
    at.send(_submit("first", session_id="s", max_new_tokens=20))
    return at


BAD = [
    (_submit(max_new_tokens=-1), 400, ["max_new_tokens", "at least 0", "-1"]),
    (_submit(tokens=()), 400, ["tokens", "at least 1"]),
    (_submit(tokens=(1, VOCAB)), 400, ["tokens", f"[0, {VOCAB - 1}]"]),
    (_submit(tokens=(-1,)), 400, ["tokens", f"[0, {VOCAB - 1}]"]),
    (_submit(stop_token_ids=frozenset([VOCAB])), 400, ["stop_token_ids", f"[0, {VOCAB - 1}]"]),
    (_submit(stop_token_ids=frozenset([-1])), 400, ["stop_token_ids", f"[0, {VOCAB - 1}]"]),
    (_submit(min_new_tokens=-1), 400, ["min_new_tokens", "at least 0", "-1"]),
    (_submit(min_new_tokens=5), 400, ["min_new_tokens", "[0, 4]", "5"]),
    (_submit(min_new_tokens=2**63, max_new_tokens=None), 400, ["min_new_tokens", "[0, 2147483647]"]),
    (_submit(min_new_tokens=1, max_new_tokens=0), 400, ["min_new_tokens", "[0, 0]", "1"]),
    (_submit(min_new_tokens=100, max_new_tokens=None), 400, ["min_new_tokens", "[0, ", "100", "--context is 64"]),
    (_submit(min_new_tokens=-1, max_new_tokens=None), 400, ["min_new_tokens", "at least 0"]),
    (_submit(num_top_logprobs=-1), 400, ["logprobs", "[0, 100]", "-1"]),
    (_submit(num_top_logprobs=101), 400, ["logprobs", "[0, 100]", "101"]),
    (_submit(prompt_logprobs_from=-1), 400, ["logprob_start_len", "[0, 3]"]),
    (_submit(prompt_logprobs_from=4), 400, ["logprob_start_len", "[0, 3]", "4"]),
    (_submit(priority=2**31), 400, ["priority"]),
    (_submit(priority=-(2**31)), 400, ["priority"]),
    (_submit(timeout_ms=0), 400, ["timeout", "0"]),
    (_submit(timeout_ms=2**41), 400, ["timeout"]),
    (_submit(stop=("",)), 400, ["stop", "1 to 1024"]),
    (_submit(stop=("x" * 1025,)), 400, ["stop", "1 to 1024"]),
    (_submit(stop=("x",) * 65), 400, ["stop", "at most 64"]),
    (_submit(sampling=SamplingParams(temperature=-1.0)), 400, ["temperature", "[0, 100]"]),
    (_submit(session_id="s", queue=True, shares_with="first"), 400, ["n", "session"]),
    (FlushCache(), 409, ["flush_cache", "1 requests"]),
    (_submit(queue=True), 400, ["queue", "session"]),
    (_submit(session_id="nobody"), 404, ["session_id", "'nobody'"]),
    (_submit("first"), 409, ["request_id", "'first'"]),
    (_submit(session_id="s"), 409, ["session_id", "'s'", "queue: true"]),
    (_submit(session_id="s", queue=True, cache_salt="y"), 400, ["cache_salt"]),
    (_submit(max_new_tokens=62), 413, ["tokens", "3", "62", "--context 64"]),
    (_submit(tokens=(1,) * 65, max_new_tokens=0), 413, ["tokens", "65", "--context 64"]),
    (Abort(request_id="nobody"), 404, ["request_id", "'nobody'"]),
    (OpenSession(session_id="s"), 409, ["session_id", "'s'"]),
    (CloseSession(session_id="nobody"), 404, ["session_id", "'nobody'"]),
    (OpenSession(session_id=""), 400, ["session_id", "1 to 256"]),
    (OpenSession(session_id="x" * 257), 400, ["session_id", "1 to 256", "257"]),
    (OpenSession(session_id="t", ttl_ms=0), 400, ["ttl_ms", "[1, ", "0"]),
    (OpenSession(session_id="t", max_tokens=0), 400, ["max_tokens", "[1, ", "0"]),
    (GetSession(session_id="nobody"), 404, ["session_id", "'nobody'"]),
    (RewindSession(session_id="nobody", turn=0), 404, ["session_id", "'nobody'"]),
    (RewindSession(session_id="s", turn=0), 409, ["session_id", "'s'", "not ended"]),
    (ForkSession(session_id="nobody", new_id="t"), 404, ["session_id", "'nobody'"]),
    (ForkSession(session_id="s", new_id="t"), 409, ["session_id", "'s'", "not ended"]),
    (_submit(turn=0), 400, ["turn", "session"]),
    (_submit(session_id="s", turn=-1, queue=True), 400, ["turn", "at least 0", "-1"]),
    (_submit(session_id="s", turn=1), 409, ["session_id", "'s'"]),
]


@pytest.mark.parametrize(("command", "status", "words"), BAD)
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


def _digest(state: State) -> list[object]:
    """Everything the loop knows, but for the number of the next arrival."""
    sessions = {
        name: [
            (session.record.slice(0, len(session.record)).tolist(), session.lease and session.lease.id),
            (session.turn, list(session.waiting), len(session.turns), session.closing, session.last_used),
        ]
        for name, session in state.sessions.table.items()
    }
    leases = [
        (lease.id, lease.holder, lease.pages, lease.claims, lease.settled_len, lease.shared_len, lease.epoch)
        for lease in state.store.leases.values()
    ]
    groups = (state.requests.values(), state.turns.values(), state.queued, state.running, state.marked)
    requests = [[(each.id, each.mark, each.row, each.max_new_tokens) for each in group] for group in groups]
    books = range(len(state.resolved.books))
    accounts = [list(state.store.ledger.accounts(book)) for book in books]
    steps = [launched.plan.step for launched in state.in_flight]
    return [
        sessions,
        repr(leases),
        requests,
        accounts,
        steps,
        list(state.close_replies),
        state.spec_counters.snapshot(),
    ]


def _refusal(at: EngineClientDouble, command: Command) -> Refused:
    """The one answer to a command that changes nothing."""
    before, answer = _digest(at.engine.state), list[Event]()
    handle_command(at.engine.state, command, answer.append)
    assert _digest(at.engine.state) == before
    at.run()
    (refused,) = answer
    assert isinstance(refused, Refused)
    return refused


@pytest.mark.parametrize(("command", "status", "words"), BAD)
def test_a_refused_command_changes_nothing_in_the_engine(command: Command, status: int, words: list[str]) -> None:
    refused = _refusal(_busy(), command)
    assert refused.status == status
    assert refused.message.startswith(words[0] + ": ")
    assert refused.param == words[0]
    name = getattr(command, "request_id", "") or getattr(command, "session_id", "")
    assert refused.request_id == name


def test_a_full_queue_refuses_instead_of_waiting() -> None:
    at = engine_client(max_running=1, max_queued=2)
    for name in ("a", "b", "c"):
        assert not any(isinstance(event, Refused) for event in at.send(_submit(name, max_new_tokens=30)))
    refused = _refusal(at, _submit("d"))
    assert (refused.request_id, refused.status) == ("d", 429)
    assert "--max-queued 2" in refused.message


def test_a_closing_session_takes_no_turn() -> None:
    at = _busy()
    at.engine.post(CloseSession(session_id="s"), at.events.append)
    answer = at.send(_submit("late", session_id="s"))
    assert isinstance(answer[0], Refused) and answer[0].status == 410
    assert SessionClosed(session_id="s") in at.events


@pytest.mark.parametrize("command", [_submit("late", session_id="s", queue=True), CloseSession(session_id="s")])
def test_nothing_more_is_asked_of_a_closing_session(command: Command) -> None:
    at = _busy()
    handle_command(at.engine.state, CloseSession(session_id="s"), at.events.append)
    refused = _refusal(at, command)
    assert refused.status == 410
    assert refused.message.startswith("session_id: ") and "'s' is closing" in refused.message


def test_closing_refuses_the_turns_that_wait_once_each() -> None:
    at = _busy()
    answers = [at.send(_submit(name, session_id="s", queue=True)) for name in ("second", "third")]
    at.send(CloseSession(session_id="s"))
    at.run()
    for name, answer in zip(("second", "third"), answers, strict=True):
        (refused,) = answer
        assert isinstance(refused, Refused)
        assert (refused.request_id, refused.status, refused.param) == (name, 410, "session_id")


def test_turns_that_wait_have_their_session_in_the_order_they_came() -> None:
    at = _busy()
    for name in ("second", "third", "fourth"):
        at.send(_submit(name, session_id="s", queue=True))
    at.run()
    ended = [event.request_id for event in at.events if isinstance(event, Finished)]
    assert ended == ["first", "second", "third", "fourth"]


def test_a_turn_may_follow_at_once_on_one_that_was_aborted() -> None:
    at = _busy()
    at.engine.post(Abort(request_id="first"), at.events.append)
    answer = at.send(_submit("next", session_id="s"))
    at.run()
    assert isinstance(answer[-1], Finished) and answer[-1].usage.prompt_tokens == 3


def test_a_turn_that_waited_in_vain_for_a_first_token_is_refused_once() -> None:
    at = _busy()
    answer = at.send(_submit("second", tokens=(), session_id="s", queue=True))
    assert answer == []
    at.send(Abort(request_id="first"))
    at.run()
    (refused,) = answer
    assert isinstance(refused, Refused) and refused.status == 400
    assert refused.message.startswith("tokens: ") and "at least 1 token" in refused.message
    assert refused.param == "tokens"


def test_an_id_may_be_used_again_once_its_request_has_ended() -> None:
    at = engine_client()
    at.send(_submit("a"))
    at.run()
    at.send(_submit("a"))
    at.run()
    assert sum(isinstance(event, Finished) for event in at.events) == 2


def test_a_request_that_names_no_limit_is_told_the_one_it_got() -> None:
    at = engine_client()
    at.send(_submit("a", max_new_tokens=None))
    at.run()
    finished = at.events[-1]
    assert isinstance(finished, Finished) and finished.reason == "length"
    assert finished.max_new_tokens == finished.usage.completion_tokens == 61


def _open(name: str = "t", **more: object) -> OpenSession:
    return OpenSession(session_id=name, **more)  # type: ignore[arg-type]


# (as much as is allowed, the least that is not)
LIMITS: dict[str, tuple[Command, Command]] = {
    "logprobs": (_submit(num_top_logprobs=LOGPROBS_MAX), _submit(num_top_logprobs=LOGPROBS_MAX + 1)),
    "priority": (_submit(priority=PRIORITY_MAX), _submit(priority=PRIORITY_MAX + 1)),
    "least priority": (_submit(priority=-PRIORITY_MAX), _submit(priority=-PRIORITY_MAX - 1)),
    "timeout": (_submit(timeout_ms=TIMEOUT_MS_MAX), _submit(timeout_ms=TIMEOUT_MS_MAX + 1)),
    "least timeout": (_submit(timeout_ms=1), _submit(timeout_ms=0)),
    "stops": (_submit(stop=("7",) * STOPS_MAX), _submit(stop=("7",) * (STOPS_MAX + 1))),
    "length of a stop": (_submit(stop=("7" * STOP_LEN_MAX,)), _submit(stop=("7" * (STOP_LEN_MAX + 1),))),
    "min_new_tokens": (_submit(min_new_tokens=4), _submit(min_new_tokens=5)),
    "logprob_start_len": (_submit(prompt_logprobs_from=3), _submit(prompt_logprobs_from=4)),
    "context": (_submit(max_new_tokens=61), _submit(max_new_tokens=62)),
    "length of an id": (_open("x" * ID_LEN_MAX), _open("x" * (ID_LEN_MAX + 1))),
    "length of a fork's id": tuple(ForkSession(session_id="s", new_id="x" * (ID_LEN_MAX + more)) for more in (0, 1)),
    "ttl": (_open(ttl_ms=TTL_MS_MAX), _open(ttl_ms=TTL_MS_MAX + 1)),
    "least ttl": (_open(ttl_ms=1), _open(ttl_ms=0)),
    "tokens of a session": (_open(max_tokens=TOKENS_MAX), _open(max_tokens=TOKENS_MAX + 1)),
    "least tokens of a session": (_open(max_tokens=1), _open(max_tokens=0)),
    "length of a rewind": (RewindSession(session_id="s", length=5), RewindSession(session_id="s", length=6)),
    "turn of a rewind": (RewindSession(session_id="s", turn=1), RewindSession(session_id="s", turn=2)),
}


@pytest.mark.parametrize("limit", list(LIMITS))
def test_what_is_just_allowed_is_taken_and_one_more_is_refused(limit: str) -> None:
    answers = []
    for command in LIMITS[limit]:
        at = engine_client()
        at.send(OpenSession(session_id="s"))
        at.send(_submit("first", session_id="s", max_new_tokens=2))
        at.run()
        answers.append(at.send(command))
        at.run()
    assert not any(isinstance(event, Refused) for event in answers[0]), answers[0]
    assert [type(event) for event in answers[1]] == [Refused]


@pytest.mark.parametrize("num_ids", [STOP_IDS_MAX, STOP_IDS_MAX + 1])
def test_as_many_stop_ids_are_looked_at_as_may_be_given(num_ids: int) -> None:
    (refused,) = engine_client().send(_submit(stop_token_ids=frozenset(range(num_ids))))
    too_many = f"at most {STOP_IDS_MAX}" in refused.message  # type: ignore[union-attr]
    assert isinstance(refused, Refused) and too_many == (num_ids > STOP_IDS_MAX), "the vocabulary is smaller"
