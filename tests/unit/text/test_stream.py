"""A stream says what a whole decode says, a stop string ends an output at the right token, a client sees none of it."""

import gc
import sys
from collections.abc import Sequence
from types import FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import RequestError
from roost.sched.intake import STOP_LEN_MAX, STOPS_MAX
from roost.text import stops as stops_module
from roost.text.stops import START, Stops
from roost.text.stream import StopCutter, StopFinder, TextStream
from roost.text.tokenizer import Tokenizer
from tests.support.small_vocabularies import byte_level, sentencepiece

BYTE_LEVEL = byte_level()
TOKENIZERS = [BYTE_LEVEL, sentencepiece()]
WORDS = "hello 🦉é日本 o日 <|im_end|> 👩‍👩‍👧"


@st.composite
def chunks(draw: st.DrawFn) -> list[list[int]]:
    """Tokens as steps bring them: those of real text, with noise between them."""
    text = draw(st.text(WORDS, max_size=12))
    ids = BYTE_LEVEL.encode(text, special=draw(st.booleans()))
    for at, noise in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, BYTE_LEVEL.vocab_size)), max_size=4)):
        ids.insert(at, noise)
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    return [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def _whole(steps: Sequence[Sequence[int]]) -> list[int]:
    return [token for step in steps for token in step]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [False, True])
@given(steps=chunks())
def test_a_stream_says_what_a_whole_decode_says(
    tokenizer: Tokenizer, skip_special: bool, steps: list[list[int]]
) -> None:
    stream = TextStream(tokenizer, skip_special=skip_special)
    text = "".join(stream.feed(step) for step in steps) + stream.flush()
    assert text == tokenizer.decode(_whole(steps), skip_special=skip_special)


@given(steps=chunks())
def test_what_a_stream_has_said_no_later_token_changes(steps: list[list[int]]) -> None:
    stream = TextStream(BYTE_LEVEL, skip_special=True)
    said = ""
    for step in steps:
        said += stream.feed(step)
        assert BYTE_LEVEL.decode(_whole(steps), skip_special=True).startswith(said)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_32_a_character_split_over_tokens_comes_out_whole(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, skip_special=True)
    said = [stream.feed([token]) for token in tokenizer.encode("a🦉日é", special=False)]
    assert "".join(said).strip() == "a🦉日é"
    assert not any("\ufffd" in text for text in said)
    assert stream.flush() == ""


def test_an_output_that_ends_inside_of_a_character_says_so_once_at_the_end() -> None:
    stream = TextStream(BYTE_LEVEL, skip_special=True)
    assert stream.feed(BYTE_LEVEL.encode("🦉", special=False)[:-1]) == ""
    assert stream.flush() == "\ufffd"


def _first(stops: tuple[str, ...], text: str) -> str | None:
    """The plain way: the stop string that is complete first; of two that end together, the longer."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return min(found)[2] if found else None


def _certain_len(stops: tuple[str, ...], text: str) -> int:
    """The plain way: where the first stop string is in a text, or where the beginning of one is at the text's end."""
    starts = [len(text)]
    for stop in stops:
        ends = [at for at in range(max(0, len(text) - len(stop) + 1), len(text)) if stop.startswith(text[at:])]
        starts += [text.find(stop)] if stop in text else ends
    return min(starts)


# as many and as long as may be asked for; each follows the others far, so that a text leaves one for the next
MANY = tuple("ab" * number + "a" * (STOP_LEN_MAX - 2 * number - 1) + "c" for number in range(STOPS_MAX))


def _kept(thing: object, seen: set[int]) -> int:
    """Characters, bytes and entries that an object holds, the tokenizer left out."""
    if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType | Tokenizer):
        return 0
    seen.add(id(thing))
    size = len(thing) if isinstance(thing, str | bytes | list | tuple | dict) else 0
    return size + sum(_kept(each, seen) for each in gc.get_referents(thing))


@pytest.mark.parametrize("stops", [(), ("Z",), ("é",), ("ZZ",), ("Z", "never", "hello 🦉!"), ("never" * 10,)])
def test_what_a_stream_keeps_does_not_grow_with_the_output(stops: tuple[str, ...]) -> None:
    finder, cutter, stream = (
        StopFinder(BYTE_LEVEL, stops, True),
        StopCutter(stops),
        TextStream(BYTE_LEVEL, skip_special=True),
    )
    words = BYTE_LEVEL.encode("hello 🦉 日本 ", special=False)
    sizes = []
    for _ in range(100):
        assert finder.feed(words) is None
        cutter.feed(stream.feed(words))
        sizes.append(_kept([finder, cutter, stream], set()))
    assert sizes[-1] == sizes[10], "after a few words it is what it stays"


def _searched(tokens: Sequence[int], stops: tuple[str, ...], skip_special: bool) -> tuple[int, str] | None:
    """The plain way: after every token look through all the text there is."""
    stream = TextStream(BYTE_LEVEL, skip_special=skip_special)
    text = ""
    for index, token in enumerate(tokens):
        text += stream.feed([token])
        for end in range(len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending:
                return index, max(ending, key=len)
    return None


stop_strings = st.lists(st.text("helo 🦉é日\ufffd>", min_size=1, max_size=4), max_size=3).map(tuple)


@pytest.mark.parametrize("skip_special", [False, True])
@given(steps=chunks(), stops=stop_strings)
def test_a_stop_is_found_where_a_plain_search_finds_it(
    skip_special: bool, steps: list[list[int]], stops: tuple[str, ...]
) -> None:
    finder = StopFinder(BYTE_LEVEL, stops, skip_special)
    start, found = 0, None
    for step in steps:
        hit = finder.feed(step)
        if hit is not None:
            found = (start + hit[0], hit[1])
            break
        start += len(step)
    assert found == _searched(_whole(steps), stops, skip_special)


@pytest.mark.parametrize(
    ("text", "stop", "index"),
    [
        ("xhello", "lo", 2),  # x hell o: begins inside of a token
        ("hello", "hell", 0),
        ("a🦉b", "🦉", 3),  # the token that finishes the character
        ("o日", "日", 2),  # the character begins inside of a token
    ],
)
def test_a_stop_ends_at_the_token_that_completes_it(text: str, stop: str, index: int) -> None:
    assert StopFinder(BYTE_LEVEL, (stop,), True).feed(BYTE_LEVEL.encode(text, special=False)) == (index, stop)


def test_the_stop_that_is_complete_first_wins_and_the_longer_of_two_that_end_together() -> None:
    ids = BYTE_LEVEL.encode("xabcd", special=False)
    assert StopFinder(BYTE_LEVEL, ("abcd", "bc"), True).feed(ids) == (3, "bc")
    assert StopFinder(BYTE_LEVEL, ("bc", "abc"), True).feed(ids) == (3, "abc")


def test_a_special_token_can_be_a_stop_string_only_where_it_is_shown() -> None:
    assert StopFinder(BYTE_LEVEL, ("<|im_end|>",), False).feed([10, 2]) == (1, "<|im_end|>")
    assert StopFinder(BYTE_LEVEL, ("<|im_end|>",), True).feed([10, 2]) is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match=r"stop: .*at least one character"):
        StopCutter(("a", ""))


letters = st.text("ab\n", max_size=5)


@given(deltas=st.lists(letters), stops=st.lists(letters.filter(bool), max_size=3).map(tuple))
def test_a_client_sees_the_text_before_the_stop_and_nothing_of_it(deltas: list[str], stops: tuple[str, ...]) -> None:
    cutter, text, seen, matched = StopCutter(stops), "", "", None
    for delta in deltas:
        text += delta
        seen += cutter.feed(delta)
        matched = _first(stops, text)
        assert text.startswith(seen)
        if matched is not None:  # the engine ends the output here
            break
    seen += cutter.finish(matched)
    assert seen == (text if matched is None else text[: text.index(matched)])


@given(deltas=st.lists(letters), stops=st.lists(letters.filter(bool), max_size=3).map(tuple))
def test_no_more_is_held_back_than_the_beginning_of_a_stop(deltas: list[str], stops: tuple[str, ...]) -> None:
    cutter, text, seen = StopCutter(stops), "", ""
    for delta in deltas:
        text += delta
        if _first(stops, text) is not None:
            return
        seen += cutter.feed(delta)
        held = text[len(seen) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(deltas=st.lists(letters), stops=st.lists(letters.filter(bool), max_size=5).map(tuple))
def test_what_is_held_back_is_what_a_plain_search_would_hold_back(deltas: list[str], stops: tuple[str, ...]) -> None:
    cutter, held = StopCutter(stops), ""
    for delta in deltas:  # also past the first stop string
        text = held + delta
        certain_len = _certain_len(stops, text)
        assert cutter.feed(delta) == text[:certain_len]
        held = text[certain_len:]


def _work(stops: tuple[str, ...], text: str) -> int:
    """Lines of the search that run for a text, which are its cost whatever the machine."""
    searched, num_lines = Stops(stops), 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace if frame.f_code.co_filename == stops_module.__file__ else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        state = START
        for char in text:
            state = searched.after(state, char)
    finally:
        sys.settrace(before)
    assert _first(stops, text) is None
    return num_lines


def test_a_character_costs_the_same_however_many_stops_there_are_and_however_long_the_output_is() -> None:
    near = "abababab" * 50 + "a" * (STOP_LEN_MAX + 9) + "b" + "ab" * 200
    assert _work(MANY, "hello " * 1000) <= 10 * _work(("never",), "hello " * 100)
    once = _work(MANY, near)
    assert once <= 30 * sum(map(len, MANY)), "each state is worked out once"
    assert _work(MANY, near * 3) - once <= 2 * 15 * len(near), "after that only the text counts"


def test_stops_take_as_much_memory_as_their_characters_whatever_the_text() -> None:
    stops = Stops(MANY)
    state = START
    for char in "abababab" * 50 + "a" * 2 * STOP_LEN_MAX:
        state = stops.after(state, char)
    assert len(stops._fallbacks) == len(stops._ends) <= STOPS_MAX * (STOP_LEN_MAX + 1)
    assert len(stops._forks) <= 2 * STOPS_MAX + 1


def test_a_character_that_ends_after_the_skipped_tokens_counts_as_text_and_those_before_it_do_not() -> None:
    tokens = BYTE_LEVEL.encode("o日o日", special=False)
    for num_skipped in range(1, len(tokens)):
        finder = StopFinder(BYTE_LEVEL, ("日",), skip_special=True)
        finder.skip(tokens[:num_skipped])
        rest = tokens[num_skipped:]
        found = finder.feed(rest)
        is_whole = BYTE_LEVEL.decode(tokens[:num_skipped], skip_special=True).startswith("o日")
        ends = [i for i in range(len(tokens)) if BYTE_LEVEL.decode(tokens[: i + 1], skip_special=True).endswith("日")]
        assert found == (ends[1 if is_whole else 0] - num_skipped, "日"), num_skipped


def test_a_cutter_looks_for_nothing_in_what_it_is_told_to_skip() -> None:
    cutter = StopCutter(("ab",))
    assert cutter.feed("xa") == "x"
    assert cutter.skip("<ab>") == "a<ab>"
    assert cutter.feed("ya") == "y"
    assert cutter.feed("b") == "" and cutter.finish("ab") == ""
