"""A model asks itself questions: different ones, the same in every run, and no more than are needed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from roost.cli.prompts import read_turns
from roost.errors import ConfigError
from roost.messages import Event, Finished, SpecStats, Submit, Tokens, Usage
from roost.text.language import Language
from roost.text.template import ChatTemplate
from roost.train.own_questions import kept_questions, new_questions
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_folder import PLAIN_TEMPLATE

LANGUAGE = Language(tokenizer=byte_level(), template=ChatTemplate(PLAIN_TEMPLATE, bos="", eos=""))


class Asks:
    """Instead of an engine: says what a function makes of a seed."""

    def __init__(self, says: Callable[[int], tuple[str, str]]) -> None:
        self._says = says
        self._waiting: list[tuple[Submit, Callable[[Event], None]]] = []
        self.asked: list[Submit] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def post(self, submit: Submit, hear: Callable[[Event], None]) -> None:
        self._waiting.append((submit, hear))
        self.asked.append(submit)

    def tick(self) -> None:
        submit, hear = self._waiting.pop(0)
        text, reason = self._says(submit.sampling.seed)
        hear(Tokens(request_id=submit.request_id, tokens=tuple(LANGUAGE.tokenizer.encode(text, special=True))))
        usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
        hear(Finished(request_id=submit.request_id, reason=reason, usage=usage, max_new_tokens=1, spec=SpecStats()))


def ask(engine: Asks, number: int, path: Path, process: int = 0) -> list[str]:
    """As many as are missing, after those that are kept."""
    kept = kept_questions(path.parent)
    if len(kept) >= number:
        return kept[:number]
    return kept + new_questions(
        engine,  # type: ignore[arg-type]
        LANGUAGE,
        number - len(kept),
        path,
        at_once=4,
        process=process,
        known=frozenset(kept),
    )


def test_questions_differ_end_by_themselves_and_say_something(tmp_path: Path) -> None:
    kinds = [("Who was Ada?<|im_end|>", "stop"), ("Why, and so on and on", "length"), ("?<|im_end|>", "stop")]
    engine = Asks(lambda seed: kinds[seed] if seed < 3 else (f" How far is {seed // 2}?<|im_end|>", "stop"))
    wanted = ["Who was Ada?", "How far is 1?", "How far is 2?"]
    assert ask(engine, 3, tmp_path / "questions.jsonl") == wanted
    assert [turns[0] for turns in read_turns(tmp_path / "questions.jsonl")] == wanted
    text = LANGUAGE.tokenizer.decode(engine.asked[0].tokens, skip_special=False)
    assert text == "<|im_start|>user\n"


def test_what_was_asked_before_is_asked_again_and_only_what_is_missing_is_new(tmp_path: Path) -> None:
    engine = Asks(lambda seed: (f"How far is {seed}?<|im_end|>", "stop"))
    first = ask(engine, 2, tmp_path / "questions.jsonl")
    again = Asks(lambda seed: (f"How far is {seed}?<|im_end|>", "stop"))
    assert ask(again, 2, tmp_path / "questions.jsonl") == first and not again.asked
    more = ask(again, 5, tmp_path / "questions.jsonl")
    assert more[:2] == first and len(set(more)) == 5
    assert ask(again, 1, tmp_path / "questions.jsonl") == first[:1]


def test_a_model_that_asks_too_little_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--own-questions: the model asked only 1 new ones, in 16 tries"):
        ask(Asks(lambda seed: ("Always the same?<|im_end|>", "stop")), 2, tmp_path / "questions.jsonl")


def test_questions_are_kept_as_they_come_and_a_line_that_was_cut_is_dropped(tmp_path: Path) -> None:
    def says(seed: int) -> tuple[str, str]:
        if seed == 3:
            raise KeyboardInterrupt
        return f"How far is {seed}?<|im_end|>", "stop"

    path = tmp_path / "questions.jsonl"
    with pytest.raises(KeyboardInterrupt):
        ask(Asks(says), 9, path)
    kept = [turns[0] for turns in read_turns(path)]
    assert kept
    with path.open("a") as file:
        file.write('{"prompt": "How fa')
    again = ask(Asks(lambda seed: (f"How deep is {seed}?<|im_end|>", "stop")), 9, path)
    assert again[: len(kept)] == kept and [turns[0] for turns in read_turns(path)] == again


def test_processes_ask_with_seeds_and_files_of_their_own_and_every_later_run_knows_all(tmp_path: Path) -> None:
    def says(seed: int) -> tuple[str, str]:
        return f"How far is {seed}?<|im_end|>", "stop"

    first = ask(Asks(says), 2, tmp_path / "questions-0.jsonl")
    both = ask(Asks(says), 4, tmp_path / "questions-1.jsonl", process=1)
    assert len(set(both)) == 4 and both[:2] == first and kept_questions(tmp_path) == both


def test_asking_ends_when_it_is_enough(tmp_path: Path) -> None:
    engine = Asks(lambda seed: (f"How far is {seed}?<|im_end|>", "stop"))
    path = tmp_path / "questions.jsonl"
    found = new_questions(engine, LANGUAGE, 99, path, at_once=4, is_enough=lambda: True)  # type: ignore[arg-type]
    assert len(found) == 1 and kept_questions(tmp_path) == found
