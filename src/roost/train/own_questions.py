"""Own questions: prompts that the target generates itself, from where its chat template begins a user's message.

They are as varied as the model's training data, and cost nothing but time. Kept in files, one for each process that
asks, so that a later run answers the same ones. Called by those who make answers.
"""

import json
from collections.abc import Callable, Container, Iterator
from itertools import count
from pathlib import Path

from roost.errors import ConfigError
from roost.messages import Finished, Submit
from roost.sampling.params import SamplingParams
from roost.sched.engine import Engine
from roost.text.language import Language
from roost.train.answers import complete_all
from roost.train.job import QUESTION_MAX

_MARK = chr(0xFFFFC)  # placeholder for the user's message
_CHARS_MIN = 8
_TRIES = 8  # most attempts for each question that is kept
_SEEDS = 2**32  # for each process


def kept_questions(folder: Path) -> list[str]:
    """The questions that earlier runs kept in a folder."""
    lines = [line for path in sorted(folder.glob("questions*.jsonl")) for line in _whole_lines(path)]
    return list(dict.fromkeys(json.loads(line)["prompt"] for line in lines))


def new_questions(
    engine: Engine,
    language: Language,
    number: int,
    path: Path,
    *,
    at_once: int,
    process: int = 0,
    known: Container[str] = (),
    is_enough: Callable[[], bool] = lambda: False,
) -> list[str]:
    """`number` questions that are not `known`, or fewer if `is_enough`, added to the file as they come.

    Each process has seeds of its own, which continue where the file ends.
    """
    lines, found = _whole_lines(path), dict[str, None]()
    first = process * _SEEDS + len(lines)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
        for text in _asked(engine, language, first=first, most=_TRIES * number, at_once=at_once):
            if text in found or text in known:
                continue
            found[text] = None
            file.write(json.dumps({"prompt": text}) + "\n")
            if len(found) == number or is_enough():
                return list(found)
    raise ConfigError(f"--own-questions: the model asked only {len(found)} new ones, in {_TRIES * number} tries")


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file; an interrupted run may have left an incomplete last one."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []


def _asked(engine: Engine, language: Language, *, first: int, most: int, at_once: int) -> Iterator[str]:
    """Questions, as they finish; those cut by the length limit or too short are left out."""
    if language.template is None:
        raise ConfigError("--own-questions: the model has no chat template that says where a user begins")
    text = language.chat_text([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    tokens, stop_ids = language.text_tokens(text.partition(_MARK)[0]), language.tokenizer.eos_ids
    submits = (
        Submit(
            request_id=f"question {number}",
            tokens=tokens,
            max_new_tokens=QUESTION_MAX,
            sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=number),
            stop_token_ids=stop_ids,
        )
        for number, _ in zip(count(first), range(most), strict=False)
    )
    for output, end in complete_all(engine, submits, at_once):
        question = language.tokenizer.decode(output, skip_special=True).strip()
        if isinstance(end, Finished) and end.reason == "stop" and len(question) >= _CHARS_MIN:
            yield question
