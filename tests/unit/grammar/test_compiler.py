"""Grammars are compiled within limits, and kept; a matcher follows one output and takes tokens back."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from roost.errors import CapacityError, RequestError
from roost.grammar import build, compiler
from roost.grammar.build import (
    ERROR_LEN_MAX,
    FORCED_MAX,
    GRAMMAR_BYTES_MAX,
    LEXER_FUEL_MAX,
    STATES_MAX,
    SYMBOLS_MAX,
    TOO_FORCED,
    check_text,
)
from roost.grammar.compiler import (
    COMPILED_BYTES_MAX,
    COMPILED_MAX,
    PENDING_MAX,
    QUICK_S,
    REFUSED_MAX,
    SLOW_PENDING_MAX,
    SLOW_S,
    Compiler,
)
from roost.grammar.matcher import allows, num_words
from roost.grammar.trial import MEMORY_MAX, Trial, TrialFailure, Tried
from tests.support.grammars import END, tiny_tokenizer
from tests.support.server_process import PATIENCE_S, wait_until
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_models import VOCAB

LATE = Tried(None)  # of a grammar that takes longer than it may
A, B = (tiny_tokenizer().encode(text, special=False)[0] for text in "AB")
# What llguidance does not bound: intersections, which it looks for a common text of.
HARD = [f"/(?s:.*)[A-Z]{{{number}}}[0-9](?s:.){{{100 + number}}}/" for number in range(60)]
ENDLESS_WORK = f"start: X\nX: {' & '.join(f'A{number}' for number in range(60))}\n" + "\n".join(
    f"A{number}: {pattern}" for number, pattern in enumerate(HARD)
)


def settings() -> tuple[str, int]:
    """Of the tiny vocabulary."""
    return tiny_tokenizer().to_json(), VOCAB


@pytest.fixture
def made() -> Iterator[Compiler]:
    """A compiler for the tiny vocabulary."""
    own = Compiler(tiny_tokenizer(), VOCAB)
    yield own
    own.close()


def outcome(own: Compiler, grammar: str) -> str:
    """Why a grammar cannot be used, "" if it can; waits for it."""
    found: list[RequestError | CapacityError | None] = []
    is_done = threading.Event()
    own.start(grammar, lambda error: (found.append(error), is_done.set())[1])
    assert is_done.wait(PATIENCE_S)
    error = found[0]
    return "" if error is None else error.reason if isinstance(error, RequestError) else f"{error.status}: {error}"


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
    monkeypatch.setattr(made._slow.trial, "run", lambda grammar: Tried(str(begin.wait())))
    quick = made._quick.trial.run
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: LATE if "long" in grammar else quick(grammar))
    ended: list[Any] = []
    made.start('start: "long"', ended.append)
    assert outcome(made, 'start: "A"') == "" and not ended
    begin.set()


def test_a_trial_has_so_much_processor_time_and_no_more() -> None:
    large = "start: X\nX: " + " | ".join(f'"A{number}"' for number in range(20_000))
    for time_s_max, told in ((60, ""), (0.02, None)):
        trial = Trial(*settings(), time_s_max=time_s_max)
        assert trial.run(large).error == told
        assert trial.run('start: "A"').error == ""
        trial.close()


def test_what_is_not_tried_in_time_is_tried_once_more_with_more_of_it(
    made: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (QUICK_S, SLOW_S) == (0.03, 2.0)
    assert [lane.trial._settings[2] for lane in (made._quick, made._slow)] == [QUICK_S, SLOW_S]
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: LATE)
    assert outcome(made, 'start: "A"') == ""
    monkeypatch.setattr(made._slow.trial, "run", lambda grammar: LATE)
    assert outcome(made, 'start: "B"') == "takes longer than 2 s to compile"


def test_a_grammar_that_takes_too_much_memory_is_refused_by_the_process_that_tries_it() -> None:
    large = "start: X\nX: " + " | ".join(f'"A{number}"' for number in range(20_000))
    for memory_max, told in ((MEMORY_MAX, ""), (MEMORY_MAX // 64, "takes too much memory to compile")):
        trial = Trial(*settings(), time_s_max=60, memory_max=memory_max)
        assert trial.run(large).error == told
        assert trial.run('start: "A"').error == ""
        trial.close()


def test_a_trial_whose_process_was_ended_begins_a_new_one(made: Compiler) -> None:
    assert outcome(made, 'start: "A"') == ""
    child = made._quick.trial._child
    assert child is not None
    child.kill()
    assert outcome(made, 'start: "B"') == ""


def test_a_tokenizer_that_llguidance_does_not_read_is_said_to_be_one_and_nothing_is_remembered() -> None:
    own = Compiler(tiny_tokenizer(), VOCAB)
    for lane in (own._quick, own._slow):
        lane.trial._settings[0] = "no tokenizer"
    for _ in range(2):
        told = "500: the grammar cannot be compiled: the process that tries grammars ended"
        assert outcome(own, 'start: "A"').startswith(told)
    assert not own._refused and not own._waiting
    own.close()


def test_a_process_that_cannot_be_started_is_no_end(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roost.grammar.trial.sys.executable", "/no/python")
    assert outcome(made, 'start: "A"').startswith("500: the grammar cannot be compiled: no process can be started")
    monkeypatch.undo()
    assert outcome(made, 'start: "A"') == ""


def test_a_trial_that_is_closed_leaves_no_process_and_starts_none() -> None:
    trial = Trial(*settings(), time_s_max=60)
    assert trial.run('start: "A"').error == ""
    child = trial._child
    trial.close()
    assert child is not None and child.poll() is not None
    with pytest.raises(TrialFailure, match="the engine has ended"):
        trial.run('start: "A"')
    trial.close()


def test_a_compiler_that_is_closed_while_it_compiles_leaves_no_process() -> None:
    own = Compiler(tiny_tokenizer(), VOCAB)
    own.start(ENDLESS_WORK, lambda error: None)
    own.close()
    for lane in (own._quick, own._slow):
        lane.thread.shutdown(wait=True)
        assert lane.trial._child is None


def test_a_text_may_have_so_many_bytes_and_no_more(made: Compiler) -> None:
    check_text("é" * (GRAMMAR_BYTES_MAX // 2))
    with pytest.raises(RequestError, match=f"grammar: {GRAMMAR_BYTES_MAX + 1} bytes long"):
        made.start("a" + "é" * (GRAMMAR_BYTES_MAX // 2), print)


def test_so_many_grammars_may_wait_and_no_more(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = threading.Event()
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: Tried(str(begin.wait())))
    for number in range(PENDING_MAX):
        made.start(f'start: "{number}"', lambda error: None)
    told: list[Any] = []
    made.start('start: "0"', told.append)  # which waits already
    with pytest.raises(CapacityError, match="wait to be compiled"):
        made.start('start: "A"', print)
    begin.set()
    wait_until(lambda: [each.reason for each in told] == ["True"])


def test_so_many_slow_grammars_may_wait_and_quick_ones_have_their_own_places(
    made: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Event()
    monkeypatch.setattr(made._slow.trial, "run", lambda grammar: Tried("late" if begin.wait() else ""))
    quick = made._quick.trial.run
    monkeypatch.setattr(made._quick.trial, "run", lambda grammar: LATE if "long" in grammar else quick(grammar))
    ended: list[Any] = []
    for number in range(SLOW_PENDING_MAX):
        made.start(f'start: "long {number}"', ended.append)
    assert outcome(made, 'start: "longer"').startswith(f"429: {SLOW_PENDING_MAX} grammars wait that take long")
    assert outcome(made, 'start: "A"') == "" and not ended
    begin.set()
    wait_until(lambda: len(ended) == SLOW_PENDING_MAX)
    assert outcome(made, 'start: "longer"') == "late"


def test_a_grammar_that_drafts_cannot_be_taken_back_of_is_refused(made: Compiler) -> None:
    for attribute in ("max_tokens=3", 'stop="X"'):
        assert "rollback" in outcome(made, f"start: t\nt[{attribute}]: /[A-Z]*/")


def test_a_grammar_that_forces_too_long_a_text_is_refused_at_once_or_when_it_comes_to_that(made: Compiler) -> None:
    assert outcome(made, f'start: "{"A" * FORCED_MAX}"') == ""
    assert outcome(made, f'start: "{"A" * (FORCED_MAX + 1)}"') == TOO_FORCED
    later = made.new_matcher(f'start: "B" | "C" | "D" "{"A" * (FORCED_MAX + 9)}"')
    assert later.consume(tiny_tokenizer().encode("D", special=False)[0])
    for _ in range(16):
        mask_of(later)
    assert later.error() == TOO_FORCED


def test_a_matcher_at_its_limit_says_so_and_can_be_gone_back_with(
    made: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are walked along and back: where that comes to a limit, the row ends, and nobody else's."""
    monkeypatch.setattr(build, "STATES_MAX", 100)
    matcher = made.new_matcher("start: /[A-Z0-9]{0,300}X/")
    for number in range(200):
        mask_of(matcher)
        if matcher.error() or not matcher.consume(A + number % 20):
            break
    assert "too many" in matcher.error()
    matcher.rollback(1)
    mask_of(matcher)
    assert matcher.forced() == [] and "too many" in matcher.error()


def test_text_that_spells_an_added_token_is_text(made: Compiler) -> None:
    matcher = made.new_matcher('start: "A<|endoftext|>B"'.upper().replace("START", "start"))
    assert matcher.forced()[:2] == tiny_tokenizer().encode("A<", special=False)
    own = Compiler(byte_level(), byte_level().vocab_size)
    spelt = own.new_matcher('start: "h<|im_end|>" "i"')
    assert b"".join(byte_level().piece(token) for token in spelt.forced()) == b"h<|im_end|>i"
    assert END not in spelt.forced()
    for token in spelt.forced()[:]:
        assert spelt.consume(token)
    assert spelt.consume(END)
    own.close()


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


def test_kept_grammars_have_taken_so_much_memory_and_no_more(made: Compiler) -> None:
    for letter in "ABC":
        made._find(f'start: "{letter}"', COMPILED_BYTES_MAX // 2)
    assert [*made._compiled] == ['start: "B"', 'start: "C"']
    made._find('start: "D"', COMPILED_BYTES_MAX + 1)
    assert [*made._compiled] == ['start: "D"']
    assert COMPILED_BYTES_MAX == 512 * 2**20


def test_what_is_no_text_is_no_grammar(made: Compiler) -> None:
    with pytest.raises(RequestError, match="grammar: must be valid Unicode"):
        made.start('start: "\ud800"', print)


def test_an_error_is_passed_on_at_some_length_and_no_more(made: Compiler) -> None:
    said = outcome(made, f"start: {'r' * 1000}")
    assert len(said) < 2 * ERROR_LEN_MAX and said.endswith("…")


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
