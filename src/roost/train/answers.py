"""Answers: what the target itself says to a list of prompts, as data to learn from.

Half of them greedy, half drawn; answers that go round in circles are dropped, since there is nothing to learn from
them. Written in shards, so that an interrupted run goes on where it was. Called by the training command.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roost.messages import Event, Finished, Submit, Tokens
from roost.sampling import Sampling
from roost.sched.engine import Engine

PERIOD_MAX = 32  # tokens of a circle that is looked for
CIRCLES_MIN = 4  # times that it must have been gone round
WARM = 0.8  # temperature of the answers that are not greedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt and what the target said."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def is_looping(output: Sequence[int]) -> bool:
    """Whether an answer ends in a circle: its last tokens are several times the same few."""
    tokens = np.asarray(output)
    for period in range(1, PERIOD_MAX + 1):
        length = period * CIRCLES_MIN
        if len(tokens) >= max(length, 2 * PERIOD_MAX):
            tail = tokens[-max(length, 2 * PERIOD_MAX) :]
            if (tail[period:] == tail[:-period]).all():
                return True
    return False


def answer_all(
    engine: Engine, prompts: Sequence[tuple[int, ...]], *, num_new: int, stop_ids: frozenset[int], at_once: int
) -> Iterator[Answer]:
    """The answers to all prompts, as they end; prompts that do not fit are left out."""
    outputs: dict[str, list[int]] = {}
    ended: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Tokens):
            outputs[event.request_id].extend(event.tokens)
        elif isinstance(event, Finished):
            ended.append(event.request_id)
        else:
            outputs.pop(event.request_id, None)  # type: ignore[union-attr]

    waiting = iter(enumerate(prompts))
    while True:
        while len(outputs) < at_once and (number_prompt := next(waiting, None)) is not None:
            number, prompt = number_prompt
            sampling = Sampling(temperature=WARM, seed=number) if number % 2 else Sampling(temperature=0.0)
            outputs[str(number)] = []
            submit = Submit(
                request_id=str(number),
                tokens=prompt,
                max_new_tokens=num_new,
                sampling=sampling,
                stop_token_ids=stop_ids,
            )
            engine.post(submit, hear)
        if not engine.has_work:
            return
        engine.tick()
        for name in ended:
            output = outputs.pop(name, [])
            if output and not is_looping(output):
                yield Answer(prompt=prompts[int(name)], output=tuple(output))
        ended.clear()


def write_shard(path: Path, answers: Sequence[Answer]) -> None:
    """Answers as one compressed file."""
    tokens = [token for each in answers for token in (*each.prompt, *each.output)]
    np.savez_compressed(
        path,
        tokens=np.array(tokens, dtype=np.int32),
        prompt_lens=np.array([len(each.prompt) for each in answers], dtype=np.int32),
        output_lens=np.array([len(each.output) for each in answers], dtype=np.int32),
    )


def read_shards(paths: Sequence[Path]) -> list[Answer]:
    """All answers of some files."""
    found = []
    for path in paths:
        with np.load(path) as shard:
            tokens, at = shard["tokens"].tolist(), 0
            for prompt_len, output_len in zip(
                shard["prompt_lens"].tolist(), shard["output_lens"].tolist(), strict=True
            ):
                middle, end = at + prompt_len, at + prompt_len + output_len
                found.append(Answer(prompt=tuple(tokens[at:middle]), output=tuple(tokens[middle:end])))
                at = end
    return found
