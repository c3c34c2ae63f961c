"""A session as its clients know it: what becomes history, and what rewind and fork leave of it."""

from dataclasses import replace

import pytest

from roost.errors import RequestError
from roost.front.answer import RepeatedTurn
from roost.front.session import ClientSession, ClientTurn, check_committed
from roost.messages import Event, Finished, Refused, SessionState, SpecStats, Tokens, Usage
from tests.unit.text.test_continuation import language
from tests.unit.text.test_template import CHAT

LANGUAGE = language(CHAT)
HELLO = {"role": "user", "content": "hello"}
FINISHED = Finished(
    request_id="r0",
    reason="stop",
    usage=Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=1),
    max_new_tokens=9,
    spec=SpecStats(),
)
REFUSED = Refused(request_id="r0", status=429, message="full")
(SAID, END) = LANGUAGE.tokenizer.encode("x<|im_end|>", special=True)


def _usage(number: int) -> Usage:
    return Usage(prompt_tokens=number, cached_tokens=0, completion_tokens=number)


def _state(turns: int) -> SessionState:
    return SessionState(
        session_id="a",
        length=0,
        resident=0,
        turns=turns,
        state="idle",
        idle_ms=0,
        ttl_ms=None,
        max_tokens=None,
        cache_salt="",
    )


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3])
def test_a_rewound_turn_may_be_sent_again_and_what_it_then_costs_is_told(num_kept: int) -> None:
    session = ClientSession("a", usages=[_usage(number) for number in range(3)])
    session.rewind(_state(num_kept))
    for number in range(num_kept):
        with pytest.raises(RepeatedTurn) as repeated:
            session.check_number(number)
        assert repeated.value.usage == _usage(number)
    for number in (num_kept, num_kept + 1):
        session.check_number(number)
    session.usages.append(_usage(10))
    with pytest.raises(RepeatedTurn) as again:
        session.check_number(num_kept)
    assert again.value.usage == _usage(10)


def test_a_fork_keeps_what_its_turns_cost_when_its_source_is_rewound() -> None:
    source = ClientSession("a", usages=[_usage(0), _usage(1)])
    fork = source.fork("b", 0, 2)
    source.rewind(_state(0))
    assert source.usages == []
    assert fork.usages == [_usage(0), _usage(1)]


def _made(session: ClientSession, last: Event = FINISHED, **given: object) -> tuple[int, ...]:
    """The tokens of a turn that was sent and has ended."""
    turn = ClientTurn(session, LANGUAGE)
    tokens = turn.input_tokens(**given, generates=True)  # type: ignore[arg-type]
    turn.on_sent()
    assert session.turn is turn
    turn.on_event(Tokens(request_id="r0", tokens=(SAID, END)))
    turn.on_event(last)
    assert session.turn is None
    return tokens


def test_what_is_said_to_a_session_in_turns_is_the_whole_chat() -> None:
    session = ClientSession("a")
    first = _made(session, messages=[HELLO])
    more = _made(session, messages=[HELLO])
    answer = {"role": "assistant", "content": "x"}
    assert (*first, SAID, END, *more) == LANGUAGE.chat_tokens([HELLO, answer, HELLO])
    assert session.transcript.num_turns == len(session.usages) == 2


@pytest.mark.parametrize(
    "last",
    [REFUSED, *(replace(FINISHED, reason=reason) for reason in ("abort", "timeout", "error"))],
    ids=lambda last: getattr(last, "reason", "refused"),
)
def test_a_turn_that_is_refused_or_ended_early_leaves_no_trace(last: Event) -> None:
    session = ClientSession("a")
    tokens = _made(session, last, messages=[HELLO])
    assert (session.transcript.length, session.usages) == (0, [])
    assert _made(session, messages=[HELLO]) == tokens
    if isinstance(last, Finished):
        with pytest.raises(RequestError, match="the session is where it was"):
            check_committed(last)


def test_only_the_first_text_of_a_session_begins_as_a_prompt_does() -> None:
    session = ClientSession("a")
    first, second = _made(session, text="hello"), _made(session, text="hello")
    assert first == LANGUAGE.prompt_tokens("hello")
    assert second == tuple(LANGUAGE.tokenizer.encode("hello", special=False))


@pytest.mark.parametrize("given", [{}, {"text": ""}, {"ids": ()}], ids=["none", "no text", "no ids"])
def test_a_turn_with_nothing_new_is_the_same_in_every_form_and_leaves_a_chat_a_chat(given: dict[str, object]) -> None:
    chat, plain = ClientSession("a"), ClientSession("b")
    _made(chat, messages=[HELLO])
    _made(plain, ids=(1, 2, 3))
    assert _made(chat, **given) == _made(plain, **given) == ()
    assert chat.transcript.is_chat and not plain.transcript.is_chat
    appended = ClientTurn(chat, LANGUAGE)
    appended.input_tokens(messages=[HELLO], generates=False)
    appended.on_sent()
    appended.on_event(FINISHED)
    answered = LANGUAGE.tokenizer.decode(_made(chat, **given), skip_special=False)
    assert answered.startswith("<|im_start|>assistant"), "an appended message is answered"
    with pytest.raises(RequestError, match="plain text or ids"):
        _made(plain, messages=[HELLO])


def test_a_session_has_one_turn_in_flight() -> None:
    session = ClientSession("a")
    ClientTurn(session, LANGUAGE).on_sent()
    with pytest.raises(AssertionError):
        ClientTurn(session, LANGUAGE).on_sent()
