"""Prefill is shared: no prompt is kept behind others for longer than the bound that is stated, whoever they are of."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.messages import Submit, Tokens
from roost.sched.admission import LOOKED_AT_MAX, OVERTAKEN_MAX
from roost.sched.prefill_shares import WaitingPrompt, prefill_shares
from tests.support.engine_client import EngineClientDouble, engine_client

waiting_prompts = st.lists(
    st.builds(WaitingPrompt, st.integers(0, 1), st.sampled_from(["", "a", "b"]), st.integers(1, 40)),
    min_size=1,
    max_size=8,
).map(lambda line: sorted(line, key=lambda prompt: -prompt.priority))


@given(waiting_prompts, st.integers(0, 120))
def test_no_token_of_a_step_is_left_while_a_prompt_lacks_one(line: list[WaitingPrompt], budget: int) -> None:
    shares = prefill_shares(line, budget)
    assert all(0 <= share <= prompt.remaining for share, prompt in zip(shares, line, strict=True))
    assert sum(shares) == min(budget, sum(prompt.remaining for prompt in line))


@given(waiting_prompts, st.integers(0, 120))
def test_each_clients_first_has_half_of_its_part_and_clients_have_equal_parts(
    line: list[WaitingPrompt], budget: int
) -> None:
    shares = prefill_shares(line, budget)
    highest = [number for number, want in enumerate(line) if want.priority == line[0].priority]
    clients = {line[number].client for number in highest}
    for client in clients:
        own = [number for number in highest if line[number].client == client]
        part, size = sum(shares[number] for number in own), sum(line[number].remaining for number in own)
        assert part >= min(size, budget // len(clients))
        assert shares[own[0]] >= min(line[own[0]].remaining, part / 2)
        shorter = [number for number in own[1:] if line[number].remaining < line[own[0]].remaining]
        served = [shares[number] for number in sorted(shorter, key=lambda number: line[number].remaining)]
        lacking = [number for number in shorter if shares[number] < line[number].remaining]
        assert served == sorted(served) or lacking, "the shortest first"
        longer = [number for number in own if number not in shorter]
        assert not lacking or not any(shares[number] for number in longer[1:]), "before what is longer than the first"
        assert shorter or shares[own[0]] == min(line[own[0]].remaining, part), "one after the other, if all are as long"


def test_a_lower_priority_has_what_the_higher_one_leaves() -> None:
    line = [WaitingPrompt(1, "", 5), WaitingPrompt(1, "", 5), WaitingPrompt(0, "", 90)]
    assert prefill_shares(line, 8) == [5, 3, 0]
    assert prefill_shares(line, 30) == [5, 5, 20]


@pytest.mark.parametrize(("num_clients", "budget"), [(3, 2), (2, 1), (4, 3), (3, 3), (3, 30)])
def test_where_there_is_not_a_token_for_each_client_who_came_first_has_it(num_clients: int, budget: int) -> None:
    line = [WaitingPrompt(0, "first", 1000), *(WaitingPrompt(0, f"c{number}", 5) for number in range(num_clients - 1))]
    assert prefill_shares(line, budget)[0] > 0


CHUNK, LONG, SHORT = 16, 400, 6


def _steps_to_first_token(at: EngineClientDouble, prompt_len: int, client: str, keep_busy: list[str]) -> int:
    """Ticks until a prompt has its first token, while others send a long prompt as soon as theirs is answered."""
    numbers, seen = count(), len(at.events)
    busy = {name: "" for name in keep_busy}
    for ticks in range(5000):
        ended = {event.request_id for event in at.events[seen:] if isinstance(event, Tokens)}
        for name, request_id in busy.items():
            if not request_id or request_id in ended:
                busy[name] = f"{name}{next(numbers)}"
                tokens = tuple(number % 40 + 1 for number in range(LONG))
                sender = name[0] if client else ""
                at.engine.post(
                    Submit(
                        request_id=busy[name], tokens=tokens, max_new_tokens=1, client=sender, cache_salt=busy[name]
                    ),
                    at.events.append,
                )
        if ticks == 3:
            tokens = tuple(range(1, prompt_len + 1))
            at.engine.post(Submit(request_id="asked", tokens=tokens, max_new_tokens=1, client=client), at.events.append)
        if "asked" in ended:
            return ticks - 3
        at.engine.tick()
    raise AssertionError("never")


@pytest.mark.parametrize("num_others", [1, 2, 6])
def test_a_short_prompt_waits_for_shorter_ones_and_not_for_long_ones(num_others: int) -> None:
    """A step's prefill of b tokens leaves b / 2 to the shortest; one more tick in flight, and one to be seen."""
    at = engine_client(chunk=CHUNK, max_running=8, num_pages=2000, context=512)
    others = [f"x{number}" for number in range(num_others)]
    assert _steps_to_first_token(at, SHORT, "", others) <= -(-SHORT // (CHUNK // 2)) + 3


def test_a_long_prompt_ends_although_shorter_ones_keep_coming() -> None:
    """What is first in line has half of every step: 2 n / b steps, however many come behind it."""
    at = engine_client(chunk=CHUNK, max_running=8, num_pages=2000, context=512)
    at.engine.post(
        Submit(request_id="long", tokens=tuple(n % 40 + 1 for n in range(LONG)), max_new_tokens=1), at.events.append
    )
    for ticks in range(2 * LONG // CHUNK + 4):
        for number in range(4):
            tokens = tuple((ticks + number + n) % 40 + 1 for n in range(SHORT))
            name = f"s{ticks}-{number}"
            at.engine.post(Submit(request_id=name, tokens=tokens, max_new_tokens=1, cache_salt=name), at.events.append)
        at.engine.tick()
    assert any(isinstance(event, Tokens) and event.request_id == "long" for event in at.events)


def test_a_client_with_many_prompts_takes_no_more_than_its_part() -> None:
    """With c clients a prompt of n tokens that is its client's first has b / 2c of every step, also a long one."""
    at = engine_client(chunk=CHUNK, max_running=8, num_pages=4000, context=512)
    others = [f"a{number}" for number in range(6)]
    assert _steps_to_first_token(at, 40, "b", others) <= -(-40 // (CHUNK // 2)) + 3


@pytest.mark.parametrize("is_behind_all", [False, True])
def test_of_a_long_queue_only_a_part_is_looked_at_for_what_needs_less(is_behind_all: bool) -> None:
    at = engine_client(num_pages=14, max_running=16, max_queued=100)
    at.send(Submit(request_id="runs", tokens=tuple(range(1, 33)), max_new_tokens=14))
    for number in range(LOOKED_AT_MAX + is_behind_all):
        tokens = tuple(range(1, 33))
        at.engine.post(
            Submit(request_id=f"w{number}", tokens=tokens, max_new_tokens=4, cache_salt="x"), at.events.append
        )
    at.send(Submit(request_id="small", tokens=(1,), max_new_tokens=1))
    started = [subject for kind, subject, _ in at.engine.state.trace.last() if kind == "admit"]
    assert ("small" in started) == (not is_behind_all)


def test_what_waits_for_pages_is_overtaken_a_few_times_by_what_needs_less_and_then_no_more() -> None:
    at = engine_client(num_pages=14, max_running=16, max_queued=100)
    at.send(Submit(request_id="runs", tokens=tuple(range(1, 33)), max_new_tokens=14))
    at.send(Submit(request_id="large", tokens=tuple(range(1, 33)), max_new_tokens=4, cache_salt="x"))
    started: list[str] = []
    for number in range(3 * OVERTAKEN_MAX):
        at.engine.post(Submit(request_id=f"s{number}", tokens=(number + 1,), max_new_tokens=1), at.events.append)
    while at.engine.has_work:
        at.engine.tick()
        started = [subject for kind, subject, _ in at.engine.state.trace.last() if kind == "admit"]
    assert started.index("large") == 1 + OVERTAKEN_MAX, started
