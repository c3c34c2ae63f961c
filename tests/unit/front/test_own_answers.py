"""Own answers: found again by the conversation in which they were given, and by nothing else."""

from typing import Any

from roost.front.own_answers import History, OwnAnswers
from roost.text.conversation import OwnAnswer
from roost.tools.definitions import read_tools

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 3?"}]
SAID: dict[str, Any] = {"role": "assistant", "content": "5"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
OWN = OwnAnswer(tokens=(7, 8, 2))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def history(messages: list[dict[str, Any]], *, tools: Any = None, client: str = "", salt: str = "") -> History:
    """The history of some messages."""
    return History.of(messages, read_tools(tools), client=client, cache_salt=salt)


def kept(answer: dict[str, Any] = SAID, **given: Any) -> OwnAnswers:
    """A memory of one answer."""
    answers = OwnAnswers()
    answers.keep(history(ASKED, **given), answer, OWN)
    return answers


def found(answers: OwnAnswers, messages: list[dict[str, Any]], **given: Any) -> dict[int, OwnAnswer]:
    """What is known of the answers among some messages."""
    return answers.find(history(messages, **given), messages)


def test_an_answer_is_found_by_what_came_before_it_and_what_it_says() -> None:
    answers = kept()
    assert found(answers, [*ASKED, SAID, ASKED[0]]) == {0: OWN}
    assert found(answers, [*ASKED, {**SAID, "content": "6"}]) == {}
    assert found(answers, [{"role": "system", "content": "Be brief."}, *ASKED, SAID]) == {}


def test_an_answer_belongs_to_its_client_its_salt_and_its_tools() -> None:
    answers = kept(client="ann", salt="s", tools=[TOOL])
    assert found(answers, [*ASKED, SAID], client="ann", salt="s", tools=[TOOL]) == {0: OWN}
    for other in ({"client": "bob"}, {"salt": ""}, {"tools": None}):
        assert found(answers, [*ASKED, SAID], **{"client": "ann", "salt": "s", "tools": [TOOL], **other}) == {}


def test_calls_are_the_same_however_a_client_writes_their_arguments_and_ids() -> None:
    answers = kept(CALL)
    written = {"name": "add", "arguments": '{"b":3,"a":2}'}
    again = {"role": "assistant", "content": None, "tool_calls": [{"id": "z", "type": "function", "function": written}]}
    assert found(answers, [*ASKED, again]) == {0: OWN}


def test_what_was_thought_may_be_left_out_and_not_changed() -> None:
    answers = kept({**SAID, "reasoning_content": "hm"})
    thoughtful = OwnAnswer(tokens=OWN.tokens, has_reasoning=True)
    assert found(answers, [*ASKED, SAID]) == {0: thoughtful}
    assert found(answers, [*ASKED, {**SAID, "reasoning_content": "hm\n"}]) == {0: thoughtful}
    assert found(answers, [*ASKED, {**SAID, "reasoning_content": "no"}]) == {}
    assert found(kept(), [*ASKED, {**SAID, "reasoning_content": "no"}]) == {}


def test_the_least_recently_used_go_first_by_number_and_by_tokens() -> None:
    for limits in ({"answers_max": 2}, {"tokens_max": 6}):
        answers = OwnAnswers(**limits)
        questions = [[{"role": "user", "content": str(number)}] for number in range(3)]
        for question in questions[:2]:
            answers.keep(history(question), SAID, OWN)
        assert found(answers, [*questions[0], SAID])  # used, so the other one goes
        answers.keep(history(questions[2]), SAID, OWN)
        assert [bool(found(answers, [*question, SAID])) for question in questions] == [True, False, True]
