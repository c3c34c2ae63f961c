"""Answers: what the target itself says to a list of prompts, as data to learn from.

Every prompt is answered twice, greedily and drawn at a temperature. Answers that go round in circles are marked, since
there is nothing to learn from them. Kept in shards, so that an interrupted run goes on where it was. Called by the
training command.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roost.messages import Event, Finished, Refused, Submit, Tokens
from roost.sampling import Sampling
from roost.sched.engine import Engine

PERIOD_MAX = 32  # tokens of a circle that is looked for
CIRCLES_MIN = 4  # times that it must have been gone round
TEMPERATURE = 0.8  # of the answers that are not greedy
REFILL = 2 / 3  # of the requests at once: below that, new ones are begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to be answered in one of two ways."""

    number: int
    prompt: tuple[int, ...]
    is_drawn: bool  # at a temperature; else greedily


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the target said."""

    number: int  # the question's
    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def is_looping(self) -> bool:
        """Whether it ends in a circle: its last tokens are several times the same few."""
        tokens = np.array(self.output[-PERIOD_MAX * CIRCLES_MIN :])
        for period in range(1, PERIOD_MAX + 1):
            tail = tokens[-max(period * CIRCLES_MIN, 2 * PERIOD_MAX) :]
            if len(tail) >= max(period * CIRCLES_MIN, 2 * PERIOD_MAX) and (tail[period:] == tail[:-period]).all():
                return True
        return False


def questions(prompts: Sequence[tuple[int, ...]], done: frozenset[int] = frozenset()) -> list[Question]:
    """Every prompt in both ways, all of one way together; those that are done are left out."""
    both = [
        Question(number=2 * number + is_drawn, prompt=prompt, is_drawn=bool(is_drawn))
        for is_drawn in (0, 1)
        for number, prompt in enumerate(prompts)
    ]
    return [each for each in both if each.number not in done]


def answer_all(
    engine: Engine, asked: Sequence[Question], *, num_new: int, stop_ids: frozenset[int], at_once: int
) -> Iterator[Answer]:
    """The answers, as they end; a question that the engine refuses has none.

    New requests are begun many at a time: most steps are of decoding alone then, which a GPU does much faster.
    """
    outputs: dict[str, list[int]] = {}
    ended: list[str] = []
    by_name = {str(each.number): each for each in asked}

    def hear(event: Event) -> None:
        if isinstance(event, Tokens):
            outputs[event.request_id].extend(event.tokens)
        elif isinstance(event, Finished | Refused):
            ended.append(event.request_id)

    waiting = iter(asked)
    while True:
        if len(outputs) <= REFILL * at_once:
            while len(outputs) < at_once and (question := next(waiting, None)) is not None:
                outputs[str(question.number)] = []
                engine.post(_submit(question, num_new, stop_ids), hear)
        if not engine.has_work:
            return
        engine.tick()
        for name in ended:
            question, output = by_name[name], tuple(outputs.pop(name))
            if output:
                yield Answer(number=question.number, prompt=question.prompt, output=output)
        ended.clear()


def _submit(question: Question, num_new: int, stop_ids: frozenset[int]) -> Submit:
    sampling = Sampling(temperature=TEMPERATURE if question.is_drawn else 0.0, seed=question.number)
    return Submit(
        request_id=str(question.number),
        tokens=question.prompt,
        max_new_tokens=num_new,
        sampling=sampling,
        stop_token_ids=stop_ids,
    )


def write_shard(path: Path, answers: Sequence[Answer]) -> None:
    """Answers as one compressed file."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            numbers=np.array([each.number for each in answers], dtype=np.int64),
            tokens=np.array([token for each in answers for token in (*each.prompt, *each.output)], dtype=np.int32),
            prompt_lens=np.array([len(each.prompt) for each in answers], dtype=np.int32),
            output_lens=np.array([len(each.output) for each in answers], dtype=np.int32),
        )
    part.replace(path)


def read_shards(paths: Sequence[Path]) -> list[Answer]:
    """All answers of some files."""
    found = []
    for path in paths:
        with np.load(path) as shard:
            tokens, at = shard["tokens"].tolist(), 0
            columns = (shard[name].tolist() for name in ("numbers", "prompt_lens", "output_lens"))
            for number, prompt_len, output_len in zip(*columns, strict=True):
                middle, end = at + prompt_len, at + prompt_len + output_len
                found.append(Answer(number=number, prompt=tuple(tokens[at:middle]), output=tuple(tokens[middle:end])))
                at = end
    return found
