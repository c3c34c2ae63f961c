"""Answers: what the target itself generates for a list of prompts, as training data.

Every prompt is answered twice, greedily and sampled at a temperature. Answers that end in a repetition loop are
detected, since there is nothing to learn from them. Kept in shards, so that an interrupted run resumes where it was.
Called by the training pipeline.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from roost.messages import Event, Finished, Refused, Submit, Tokens
from roost.sampling.params import SamplingParams
from roost.sched.engine import Engine

PERIOD_MAX = 32  # longest repetition that is looked for, in tokens
CIRCLES_MIN = 4  # how often it must repeat
TEMPERATURE = 0.8  # of the sampled answers
BLOCK = 1024  # prompts that are answered greedily before they are answered by sampling
REFILL = 2 / 3  # new requests are submitted when fewer than this share of `at_once` run


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt to be answered, greedily or by sampling."""

    prompt: tuple[int, ...]
    is_drawn: bool  # sampled at a temperature; else greedy

    @property
    def name(self) -> str:
        """Its request id, the same in every run."""
        return f"{key(self.prompt):x}-{'drawn' if self.is_drawn else 'greedy'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAnswer:
    """What the target generated for a question."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    is_drawn: bool

    @property
    def question(self) -> Question:
        """The question that it answers."""
        return Question(prompt=self.prompt, is_drawn=self.is_drawn)

    @property
    def is_looping(self) -> bool:
        """Whether it ends in a loop: its last tokens are the same few, repeated."""
        tokens = np.array(self.output[-PERIOD_MAX * CIRCLES_MIN :])
        for period in range(1, PERIOD_MAX + 1):
            tail = tokens[-max(period * CIRCLES_MIN, 2 * PERIOD_MAX) :]
            if len(tail) >= max(period * CIRCLES_MIN, 2 * PERIOD_MAX) and (tail[period:] == tail[:-period]).all():
                return True
        return False


def key(prompt: Sequence[int]) -> int:
    """A hash of a prompt."""
    return int.from_bytes(blake2b(np.asarray(prompt, dtype=np.int64).tobytes(), digest_size=7).digest())


def questions(prompts: Sequence[tuple[int, ...]], done: Container[Question] = ()) -> list[Question]:
    """Every prompt greedily and sampled, in blocks of one kind; without duplicates, and without those done already."""
    unique = list(dict.fromkeys(prompts))
    both = [
        Question(prompt=prompt, is_drawn=is_drawn)
        for first in range(0, len(unique), BLOCK)
        for is_drawn in (False, True)
        for prompt in unique[first : first + BLOCK]
    ]
    return [each for each in both if each not in done]


def answer_all(
    engine: Engine, asked: Sequence[Question], *, num_new: int, stop_ids: frozenset[int], at_once: int
) -> Iterator[TrainingAnswer]:
    """The answers, as they finish; a question that the engine refuses, or fails at, has none."""
    by_name = {each.name: each for each in asked}
    submits = (_submit(each, num_new, stop_ids) for each in by_name.values())
    for output, end in complete_all(engine, submits, at_once):
        question = by_name[end.request_id]
        if output and isinstance(end, Finished) and end.reason in ("stop", "length"):
            yield TrainingAnswer(prompt=question.prompt, output=output, is_drawn=question.is_drawn)


def complete_all(
    engine: Engine, submits: Iterator[Submit], at_once: int
) -> Iterator[tuple[tuple[int, ...], Finished | Refused]]:
    """The output and the final event of every request, as they finish.

    New requests are submitted in groups, so that most steps are decode-only, which a GPU runs much faster.
    """
    outputs: dict[str, list[int]] = {}
    ended: list[Finished | Refused] = []

    def hear(event: Event) -> None:
        if isinstance(event, Tokens):
            outputs[event.request_id].extend(event.tokens)
        elif isinstance(event, Finished | Refused):
            ended.append(event)

    while True:
        if len(outputs) <= REFILL * at_once:
            while len(outputs) < at_once and (submit := next(submits, None)) is not None:
                outputs[submit.request_id] = []
                engine.post(submit, hear)
        if not engine.has_work:
            return
        engine.tick()
        for end in ended:
            yield tuple(outputs.pop(end.request_id)), end
        ended.clear()


def _submit(question: Question, num_new: int, stop_ids: frozenset[int]) -> Submit:
    sampling = SamplingParams(temperature=TEMPERATURE if question.is_drawn else 0.0, seed=key(question.prompt))
    return Submit(
        request_id=question.name,
        tokens=question.prompt,
        max_new_tokens=num_new,
        sampling=sampling,
        stop_token_ids=stop_ids,
    )


def write_shard(path: Path, answers: Sequence[TrainingAnswer]) -> None:
    """Write answers as one file, atomically."""
    part = path.with_name(path.name + ".part")
    tokens = np.array([token for each in answers for token in (*each.prompt, *each.output)], dtype=np.int32)
    columns = {
        "is_drawn": np.array([each.is_drawn for each in answers], dtype=np.bool_),
        "tokens": tokens.astype(np.uint16) if tokens.max(initial=0) < 2**16 else tokens,
        "prompt_lens": np.array([len(each.prompt) for each in answers], dtype=np.int32),
        "output_lens": np.array([len(each.output) for each in answers], dtype=np.int32),
    }
    save_file(columns, part)
    part.replace(path)


def read_shards(paths: Sequence[Path]) -> list[TrainingAnswer]:
    """All answers of some files."""
    found = []
    for path in paths:
        shard = load_file(path)
        tokens, at = shard["tokens"].tolist(), 0
        columns = (shard[name].tolist() for name in ("is_drawn", "prompt_lens", "output_lens"))
        for is_drawn, prompt_len, output_len in zip(*columns, strict=True):
            middle, end = at + prompt_len, at + prompt_len + output_len
            prompt, output = tuple(tokens[at:middle]), tuple(tokens[middle:end])
            found.append(TrainingAnswer(prompt=prompt, output=output, is_drawn=is_drawn))
            at = end
    return found
