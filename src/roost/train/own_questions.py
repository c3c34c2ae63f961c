"""Own questions: prompts that the target generates itself, from where its chat template begins a user's message.

They are as varied as the model's training data, and cost nothing but time. Kept in a file, so that a later run answers
the same ones. Called by the training pipeline.
"""

import json
from collections.abc import Iterator
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


def own_questions(engine: Engine, language: Language, number: int, path: Path, at_once: int) -> list[str]:
    """`number` different questions; those in the file are kept, and new ones are added to it as they come."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text.split("\n")[:-1]  # an interrupted run may have left an incomplete last line
    found = dict.fromkeys(json.loads(line)["prompt"] for line in lines)
    if len(found) < number:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
            for text in _asked(engine, language, first=len(found), most=_TRIES * number, at_once=at_once):
                if text not in found:
                    file.write(json.dumps({"prompt": text}) + "\n")
                found[text] = None
                if len(found) == number:
                    break
        if len(found) < number:
            raise ConfigError(
                f"--own-questions {number}: the model asked only {len(found)}, in {_TRIES * number} tries"
            )
    return list(found)[:number]


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
