"""Stop strings through the whole engine: which token completes one, where the text is cut, what a stream shows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, Options, SchedConfig
from tests.support.chain_model import save_chain, token, written

OWL = "🦉".encode()
DAY = "日".encode()
#            1     2     3            4         5        6       7        8        9        10   11   12
PIECES = ("h", "e", " hell", b"o" + DAY[:1], DAY[1:2], DAY[2:], OWL[:2], OWL[2:3], OWL[3:], "x", "y", "z", "<|im_end|>")
TEXT = written(*PIECES[1:12])  # "e hello日🦉xyz"
GREEDY = Options(temperature=0)


@pytest.fixture(scope="module", params=[0, 1], ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that writes PIECES after an "h"."""
    folder: Path = save_chain(tmp_path_factory.mktemp("chain"), *PIECES)
    config = EngineConfig(
        model=ModelConfig(weights="fp32", threads=1),
        memory=MemoryConfig(page_size=4, pool_tokens=256, strict_memory=2),
        sched=SchedConfig(overlap=bool(request.param)),
    )
    with LLM(str(folder), config) as llm:
        yield llm


def test_without_a_stop_string_the_output_goes_on_to_its_end(llm: LLM) -> None:
    choice = llm.generate("h", GREEDY).choices[0]
    assert (choice.text, choice.finish_reason, choice.matched) == (TEXT, "stop", token("<|im_end|>"))
    assert choice.tokens == tuple(map(token, PIECES[1:]))


@pytest.mark.parametrize(
    ("stops", "text", "num_tokens", "matched"),
    [
        (("e",), "", 1, "e"),  # a whole token
        (("ell",), "e h", 2, "ell"),  # inside a token
        (("llo",), "e he", 3, "llo"),  # begins in the middle of a token, ends in the middle of the next
        (("e hello",), "", 3, "e hello"),  # over three tokens, all of the text
        (("o日",), "e hell", 5, "o日"),  # completes with the last byte of a character
        (("日🦉x",), "e hello", 9, "日🦉x"),  # characters of several tokens, on both sides
        (("🦉",), "e hello日", 8, "🦉"),
        (("lp", "q", "xyz!", "z"), "e hello日🦉xy", 11, "z"),  # the others only look alike
        (("xyz", "y"), "e hello日🦉x", 10, "y"),  # the one that is complete first
        (("yz", "xyz"), "e hello日🦉", 11, "xyz"),  # of two that end together, the longer
        (("hello", " h"), "e", 2, " h"),
        (("l", "ll", " hell"), "e he", 2, "l"),  # complete within one token: by characters
    ],
)
def test_an_output_ends_with_the_token_that_completes_a_stop(
    llm: LLM, stops: tuple[str, ...], text: str, num_tokens: int, matched: str
) -> None:
    choice = llm.generate("h", replace(GREEDY, stop=stops)).choices[0]
    assert (choice.text, choice.finish_reason, choice.matched) == (text, "stop", matched)
    assert choice.tokens == tuple(map(token, PIECES[1:]))[:num_tokens]
    assert choice.usage.completion_tokens == num_tokens


@pytest.mark.parametrize("stop", ["never", "z!", "日\ufffd", "e hello日🦉xyz!"])
def test_a_stop_that_does_not_come_takes_nothing_away(llm: LLM, stop: str) -> None:
    choice = llm.generate("h", replace(GREEDY, stop=(stop,))).choices[0]
    assert (choice.text, choice.matched) == (TEXT, token("<|im_end|>"))


def test_a_stop_is_kept_in_the_text_if_asked_for(llm: LLM) -> None:
    choice = llm.generate("h", replace(GREEDY, stop=("ell",), no_stop_trim=True)).choices[0]
    assert (choice.text, choice.usage.completion_tokens) == ("e hell", 2)


def test_a_stop_in_the_prompt_ends_nothing(llm: LLM) -> None:
    assert llm.generate("xyzh", replace(GREEDY, stop=("xyzh", "zhe"), max_new_tokens=2)).text == "e hell"


@pytest.mark.parametrize(("min_new_tokens", "text", "num_tokens"), [(1, "e h", 2), (2, TEXT, 12), (5, TEXT, 12)])
def test_a_stop_among_the_first_tokens_that_must_come_does_not_count(
    llm: LLM, min_new_tokens: int, text: str, num_tokens: int
) -> None:
    options = replace(GREEDY, stop=("ell",), min_new_tokens=min_new_tokens)
    choice = llm.generate("h", options).choices[0]
    assert (choice.text, len(choice.tokens)) == (text, num_tokens)


def test_a_special_token_is_text_for_a_stop_only_where_it_is_shown(llm: LLM) -> None:
    options = replace(GREEDY, stop=("z<|im_end|>",), ignore_eos=True, max_new_tokens=12)
    assert llm.generate("h", options).choices[0].finish_reason == "length"
    shown = llm.generate("h", replace(options, skip_special_tokens=False)).choices[0]
    assert (shown.text, shown.matched) == (TEXT.removesuffix("z"), "z<|im_end|>")


def test_ignoring_the_end_writes_on_past_it(llm: LLM) -> None:
    choice = llm.generate("h", replace(GREEDY, ignore_eos=True, max_new_tokens=14)).choices[0]
    assert choice.finish_reason == "length" and choice.tokens[:12] == tuple(map(token, PIECES[1:]))
    assert choice.text.startswith(TEXT) and len(choice.tokens) == 14


@pytest.mark.parametrize("stop", ["", "llo", "日🦉x", "xyz", "yz!"])
def test_a_stream_shows_whole_characters_and_never_a_part_of_the_stop(llm: LLM, stop: str) -> None:
    options = replace(GREEDY, stop=(stop,) if stop else ())
    whole = llm.generate("h", options).choices[0]
    pieces = list(llm.stream("h", options))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens
    assert [piece.finished is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_an_unfinished_character_at_the_end_is_shown_as_such(llm: LLM) -> None:
    assert llm.generate("h", replace(GREEDY, max_new_tokens=4)).text == "e hello\ufffd"
