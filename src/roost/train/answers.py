"""Answers: what the target itself generates for a list of conversations, as training data.

Every conversation is held twice, greedily and sampled at a temperature that a prompt's hash decides; what the target
answered is part of the next turn's prompt. Answers that end in a repetition loop are detected, since there is nothing
to learn from them. Kept in shards, so that an interrupted run resumes where it was. Called by the training pipeline.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import load_file, save_file

from roost.messages import Event, Finished, Refused, Submit, Tokens
from roost.sampling.params import SamplingParams
from roost.sched.engine import Engine
from roost.text.language import Language

PERIOD_MAX = 32  # longest repetition that is looked for, in tokens
CIRCLES_MIN = 4  # how often it must repeat
TEMPERATURES = (0.7, 0.85, 1.0)  # of sampled answers; a hash of the prompt says which
BLOCK = 1024  # conversations that are held greedily before they are held by sampling
OLD_TEMPERATURE = 0.8  # of sampled answers in shards that do not say
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

    @property
    def temperature(self) -> float:
        """The temperature of its answer; 0: greedy."""
        return TEMPERATURES[key(self.prompt) % len(TEMPERATURES)] if self.is_drawn else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingAnswer:
    """What the target generated for a question."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    temperature: float  # 0: greedy

    @property
    def question(self) -> Question:
        """The question that it answers."""
        return Question(prompt=self.prompt, is_drawn=self.temperature > 0)

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


@dataclass(slots=True, kw_only=True)
class TrainingTalk:
    """The user's messages, and how far the target has answered them."""

    turns: tuple[str, ...]
    is_drawn: bool
    said: list[str] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether every message was answered."""
        return len(self.said) == len(self.turns)

    def question(self, language: Language) -> Question:
        """The next question: all messages and answers up to the first message without an answer."""
        if language.template is None:  # a plain text that grows
            text = "\n\n".join(
                (*(word for pair in zip(self.turns, self.said, strict=False) for word in pair), self._next)
            )
            return Question(prompt=language.prompt_tokens(text), is_drawn=self.is_drawn)
        messages: list[dict[str, Any]] = []
        for turn, answer in zip(self.turns, self.said, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        prompt = language.chat_tokens([*messages, {"role": "user", "content": self._next}])
        return Question(prompt=prompt, is_drawn=self.is_drawn)

    @property
    def _next(self) -> str:
        return self.turns[len(self.said)]


def conversations(talks: Sequence[Sequence[str]]) -> list[TrainingTalk]:
    """Each list of a user's messages greedily and sampled, in blocks of one kind, without duplicates.

    Their order is that of a hash, so that a run which ends early has answers of every kind.
    """

    def rank(talk: tuple[str, ...]) -> bytes:
        return blake2b("\0".join(talk).encode(), digest_size=8).digest()

    unique = sorted(dict.fromkeys(tuple(talk) for talk in talks), key=rank)
    return [
        TrainingTalk(turns=talk, is_drawn=is_drawn)
        for first in range(0, len(unique), BLOCK)
        for is_drawn in (False, True)
        for talk in unique[first : first + BLOCK]
    ]


class Dialogue:
    """Conversations with the target: which questions are open, and what follows from an answer.

    `done` are answers of earlier runs; they are not asked for again, but their conversations continue.
    """

    def __init__(
        self, talks: Sequence[TrainingTalk], language: Language, done: Mapping[Question, Sequence[int]], longest: int
    ) -> None:
        self._language, self._done, self._longest = language, done, longest
        self._ready = deque(talks)
        self._asked: dict[str, tuple[Question, list[TrainingTalk]]] = {}
        self.num_too_long = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Question:
        """The next open question. May have more after it had none: answers open further ones."""
        while self._ready:
            talk = self._ready.popleft()
            question = talk.question(self._language)
            if question in self._done:
                self._hear(talk, self._done[question])
            elif question.name in self._asked:  # two conversations that begin alike
                self._asked[question.name][1].append(talk)
            elif len(question.prompt) >= self._longest:
                self.num_too_long += 1
            else:
                self._asked[question.name] = (question, [talk])
                return question
        raise StopIteration

    def answered(self, name: str, output: Sequence[int]) -> Question:
        """Note the answer to a question; without one its conversations are over."""
        question, talks = self._asked.pop(name)
        for talk in talks if output else ():
            self._hear(talk, output)
        return question

    def _hear(self, talk: TrainingTalk, output: Sequence[int]) -> None:
        talk.said.append(self._language.tokenizer.decode(output, skip_special=True).strip())
        if not talk.is_over:
            self._ready.appendleft(talk)  # its prefix is in the KV cache


class _Submits:
    """The requests of a dialogue's open questions."""

    def __init__(self, dialogue: Dialogue, num_new: int, stop_ids: frozenset[int]) -> None:
        self._dialogue, self._num_new, self._stop_ids = dialogue, num_new, stop_ids

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Submit:
        question = next(self._dialogue)
        return Submit(
            request_id=question.name,
            tokens=question.prompt,
            max_new_tokens=self._num_new,
            sampling=SamplingParams(temperature=question.temperature, seed=key(question.prompt)),
            stop_token_ids=self._stop_ids,
        )


def answer_all(
    engine: Engine, dialogue: Dialogue, *, num_new: int, stop_ids: frozenset[int], at_once: int
) -> Iterator[TrainingAnswer]:
    """The answers, as they finish; a question that the engine refuses, or fails at, has none."""
    for output, end in complete_all(engine, _Submits(dialogue, num_new, stop_ids), at_once):
        is_whole = isinstance(end, Finished) and end.reason in ("stop", "length")
        question = dialogue.answered(end.request_id, output if is_whole else ())
        if output and is_whole:
            yield TrainingAnswer(prompt=question.prompt, output=output, temperature=question.temperature)


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


def write_shard(path: Path, answers: Sequence[TrainingAnswer]) -> None:
    """Write answers as one file, atomically."""
    part = path.with_name(path.name + ".part")
    tokens = np.array([token for each in answers for token in (*each.prompt, *each.output)], dtype=np.int32)
    columns = {
        "temperatures": np.array([each.temperature for each in answers], dtype=np.float32),
        "tokens": tokens.astype(np.uint16) if tokens.max(initial=0) < 2**16 else tokens,
        "prompt_lens": np.array([len(each.prompt) for each in answers], dtype=np.int32),
        "output_lens": np.array([len(each.output) for each in answers], dtype=np.int32),
    }
    save_file(columns, part)
    part.replace(path)


def read_shards(paths: Sequence[Path]) -> list[TrainingAnswer]:
    """All answers of some files, one for each question."""
    found: dict[Question, TrainingAnswer] = {}
    for path in paths:
        shard = load_file(path)
        tokens, at = shard["tokens"].tolist(), 0
        temperatures = shard["temperatures"] if "temperatures" in shard else shard["is_drawn"] * OLD_TEMPERATURE
        columns = (temperatures.tolist(), shard["prompt_lens"].tolist(), shard["output_lens"].tolist())
        for temperature, prompt_len, output_len in zip(*columns, strict=True):
            middle, end = at + prompt_len, at + prompt_len + output_len
            prompt, output = tuple(tokens[at:middle]), tuple(tokens[middle:end])
            answer = TrainingAnswer(prompt=prompt, output=output, temperature=round(temperature, 4))
            found.setdefault(answer.question, answer)
            at = end
    return list(found.values())
