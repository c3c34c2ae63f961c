"""Grammars are compiled within limits, and kept; a matcher follows one output and takes tokens back."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from roost.errors import CapacityError, RequestError
from roost.grammar import build, compiler
from roost.grammar.build import GRAMMAR_BYTES_MAX, LEXER_FUEL_MAX, STATES_MAX, SYMBOLS_MAX, check_size
from roost.grammar.compiler import COMPILED_MAX, PENDING_MAX, REFUSED_MAX, Compiler
from roost.grammar.matcher import allows, num_words
from roost.grammar.trial import MEMORY_MAX, Trial
from tests.support.grammars import END, tiny_tokenizer
from tests.support.tiny_models import VOCAB

A, B = (tiny_tokenizer().encode(text, special=False)[0] for text in "AB")
# What llguidance does not bound: intersections, which it looks for a common text of.
HARD = [f"/(?s:.*)[A-Z]{{{number}}}[0-9](?s:.){{{100 + number}}}/" for number in range(60)]
ENDLESS_WORK = f"start: X\nX: {' & '.join(f'A{number}' for number in range(60))}\n" + "\n".join(
    f"A{number}: {pattern}" for number, pattern in enumerate(HARD)
)


def settings() -> tuple[str, int, frozenset[int]]:
    """Of the tiny vocabulary."""
    tokenizer = tiny_tokenizer()
    return tokenizer.inner_json(), VOCAB, tokenizer.eos_ids


@pytest.fixture
def made() -> Iterator[Compiler]:
    """A compiler for the tiny vocabulary."""
    own = Compiler(*settings())
    yield own
    own.close()


def outcome(own: Compiler, grammar: str) -> str:
    """Why a grammar cannot be used, "" if it can; waits for it."""
    found: list[str] = []
    is_done = threading.Event()
    own.start(grammar, lambda error: (found.append(error), is_done.set())[1])
    is_done.wait()
    return found[0]


def mask_of(matcher: compiler.GrammarMatcher) -> set[int]:
    """The tokens that may come next."""
    mask = np.zeros(num_words(VOCAB), dtype=np.int32)
    matcher.fill(mask)
    return {token for token in range(VOCAB) if allows(mask, token)}


def test_a_grammar_that_can_be_enforced_is_compiled_and_one_that_cannot_is_refused_with_the_reason(
    made: Compiler,
) -> None:
    assert outcome(made, 'start: "A" | "B"') == ""
    assert mask_of(made.new_matcher('start: "A" | "B"')) == {A, B}
    assert outcome(made, 'start: %json {"uniqueItems": true}') == (
        'cannot be enforced: failed to compile JSON schema: Unimplemented keys: ["uniqueItems"]'
    )
    assert "look-around" in outcome(made, "start: /(?=A)B/")


def test_a_grammar_that_takes_too_long_is_refused_and_remembered(made: Compiler) -> None:
    said = outcome(made, ENDLESS_WORK)
    assert said in (f"takes longer than {compiler.SLOW_S:g} s to compile", "takes too much memory to compile")
    assert outcome(made, 'start: "A"') == ""
    made.close()  # nobody compiles any more: what came of both is known
    assert outcome(made, ENDLESS_WORK) == said and outcome(made, 'start: "A"') == ""


def test_a_grammar_that_takes_long_holds_up_no_other(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    monkeypatch.setattr(made._slow.trial, "run", lambda grammar: str(begin.wait()))
    quick = made._quick.trial.run
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: None if "long" in grammar else quick(grammar))
    ended: list[str] = []
    made.start('start: "long"', ended.append)
    assert outcome(made, 'start: "A"') == "" and not ended
    begin.set()


def test_a_trial_has_so_much_processor_time_and_no_more() -> None:
    large = "start: " + " | ".join(f'"A{number}"' for number in range(20_000))
    for time_s_max, told in ((60, ""), (0.02, None)):
        trial = Trial(*settings(), time_s_max=time_s_max)
        assert trial.run(large) == told
        assert trial.run('start: "A"') == ""
        trial.close()


def test_what_is_not_tried_in_time_is_tried_once_more_with_more_of_it(
    made: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: None)
    assert outcome(made, 'start: "A"') == ""
    monkeypatch.setattr(made._slow.trial, "run", lambda grammar: None)
    assert outcome(made, 'start: "B"').startswith("takes longer than")


def test_a_grammar_that_takes_too_much_memory_is_refused_by_the_process_that_tries_it() -> None:
    large = "start: " + " | ".join(f'"A{number}"' for number in range(20_000))
    for memory_max, told in ((MEMORY_MAX, ""), (MEMORY_MAX // 64, "takes too much memory to compile")):
        trial = Trial(*settings(), time_s_max=60, memory_max=memory_max)
        assert trial.run(large) == told
        assert trial.run('start: "A"') == ""
        trial.close()


def test_a_trial_whose_process_was_ended_begins_a_new_one(made: Compiler) -> None:
    assert outcome(made, 'start: "A"') == ""
    child = made._quick.trial._child
    assert child is not None
    child.kill()
    child.wait()
    assert outcome(made, 'start: "B"') == ""


def test_a_text_may_have_so_many_bytes_and_no_more(made: Compiler) -> None:
    check_size("é" * (GRAMMAR_BYTES_MAX // 2))
    with pytest.raises(RequestError, match=f"grammar: {GRAMMAR_BYTES_MAX + 1} bytes long"):
        made.start("a" + "é" * (GRAMMAR_BYTES_MAX // 2), print)


def test_so_many_grammars_may_wait_and_no_more(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: str(begin.wait()))
    for number in range(PENDING_MAX):
        made.start(f'start: "{number}"', lambda error: None)
    with pytest.raises(CapacityError, match="wait to be compiled"):
        made.start('start: "A"', print)
    begin.set()


def test_so_many_grammars_are_kept_and_those_used_longest_ago_are_forgotten(
    made: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILED_MAX", 3)
    monkeypatch.setattr(compiler, "REFUSED_MAX", 2)
    for number in range(3):
        made.new_matcher(f'start: "{number}"')
    made.new_matcher('start: "0"')
    made.new_matcher('start: "A"')
    assert [*made._compiled] == ['start: "2"', 'start: "0"', 'start: "A"']
    for number in range(3):
        assert outcome(made, f"start: r{number}") != ""
    assert [*made._refused] == ["start: r1", "start: r2"]
    assert COMPILED_MAX == REFUSED_MAX == 256


def test_what_llguidance_bounds_itself_has_these_bounds(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (LEXER_FUEL_MAX, STATES_MAX, SYMBOLS_MAX) == (1_000_000, 50_000, 200_000)
    text, rules = "start: /[A-Z0-9]{0,300}X/", 'start: ("A" "B"? | "C"){5,500}'
    assert consumed(made.new_matcher(text), 200) == 200
    made.new_matcher(rules)
    monkeypatch.setattr(build, "STATES_MAX", 100)
    assert consumed(made.new_matcher(text + "\n"), 200) < 200
    monkeypatch.setattr(build, "SYMBOLS_MAX", 20)
    assert "number of symbols" in refusal(made, rules + "\n")
    monkeypatch.setattr(build, "LEXER_FUEL_MAX", 10)
    assert "initial lexer configuration (grammar) too big" in refusal(made, "start: /[A-Z]{1,9}[0-9]{1,9}/")


def consumed(matcher: compiler.GrammarMatcher, number: int) -> int:
    """How many tokens a matcher takes, with a mask before each."""
    for count in range(number):
        mask_of(matcher)
        if matcher.error() or not matcher.consume(A):
            return count
    return number


def refusal(made: Compiler, grammar: str) -> str:
    """Why a grammar cannot be built here."""
    with pytest.raises(RequestError) as refused:
        made.new_matcher(grammar)
    return refused.value.reason


def test_once_a_grammar_is_finished_only_end_tokens_come_and_all_of_it_can_be_taken_back(made: Compiler) -> None:
    matcher = made.new_matcher('start: "AB"')
    assert not matcher.consume(END) and not matcher.consume(B)
    assert matcher.forced()[:2] == [A, B]
    assert matcher.consume(A) and matcher.consume(B)
    assert mask_of(matcher) == {END}
    assert matcher.consume(END) and matcher.consume(END) and not matcher.consume(A)
    assert mask_of(matcher) == {END} and matcher.forced() == []
    matcher.rollback(3)
    assert mask_of(matcher) == {B} and matcher.error() == ""


def test_matchers_of_one_grammar_do_not_share_their_state(made: Compiler) -> None:
    first, second = (made.new_matcher('start: "AB" | "BA"') for _ in range(2))
    assert first.consume(A)
    assert mask_of(first) == {B} and mask_of(second) == {A, B}
