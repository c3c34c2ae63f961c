"""Questions that a target asks itself: it goes on where a user would begin to speak.

They are as varied as what the model was taught with, and cost nothing but time. Kept in a file, so that the same ones
are answered again in a later run. Called by the training.
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

_MARK = chr(0xFFFFC)  # stands for what the user says
_CHARS_MIN = 8
_TRIES = 8  # for each question that is kept, at most


def own_questions(engine: Engine, language: Language, number: int, path: Path, at_once: int) -> list[str]:
    """So many different questions; those that the file has are kept, and the others are added as they come."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text.split("\n")[:-1]  # what comes after the last one was cut off
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
    """Questions, as they end; what never ends, or says next to nothing, is left out."""
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
