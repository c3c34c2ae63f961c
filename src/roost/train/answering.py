"""Answering: has the target hold conversations, in one process or in several on the same device, and keeps the answers.

What earlier runs answered is not answered again, whatever number of processes they had: every process writes files of
its own, and they share out only what is left. Never trains. Called by the training command.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import torch

from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SpecConfig
from roost.errors import ConfigError
from roost.startup import Running, start
from roost.train.answers import Dialogue, TrainingAnswer, answer_all, conversations, read_shards, write_shard
from roost.train.composed_prompts import compose
from roost.train.job import Job
from roost.train.own_questions import kept_questions, new_questions

SHARD_ANSWERS = 4096
CHUNK = 8192  # prompt tokens in a step
_POLL_S = 0.5

AnswersDone = Callable[[int, int], None]  # (answers done, answers in all)
Talks = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one process has to answer."""

    process: int
    talks: Talks
    num_new_questions: int
    known: frozenset[str]  # questions that were asked before


def kept_answers(job: Job) -> list[TrainingAnswer]:
    """All answers in the job's folder."""
    return read_shards(sorted((job.folder / "answers").glob("*.safetensors")))


def make_answers(job: Job, talks: Talks, told: AnswersDone) -> None:
    """Have the target answer what it has not answered yet, its own questions too, until the budget is spent."""
    (job.folder / "answers").mkdir(exist_ok=True)
    shares = _shares(job, talks)
    if job.processes == 1:
        _answer(job, shares[0], told)
        return
    context = multiprocessing.get_context("spawn")  # a device cannot be used after a fork
    counts, is_over = context.Array("q", 2 * job.processes), context.Event()
    running = [
        context.Process(target=_in_process, args=(job, share, torch.get_num_threads(), counts, is_over))
        for share in shares
    ]
    try:
        for process in running:
            process.start()
        while any(process.is_alive() for process in running):
            time.sleep(_POLL_S)
            told(sum(counts[0::2]), sum(counts[1::2]))
    finally:
        is_over.set()  # after Ctrl-C they keep what they have
        for process in running:
            if process.pid is not None:  # was started
                process.join()
    failed = [number for number, process in enumerate(running) if process.exitcode != 0]
    if failed:
        raise ConfigError(f"--processes {job.processes}: process {failed[0]} failed; its error is above")


def _shares(job: Job, talks: Talks) -> list[_Share]:
    """What each process has to do: every so-many-th conversation, and an equal part of the questions still to ask."""
    kept = kept_questions(job.folder)[: job.own_questions]
    texts = [text for talk in talks for text in talk]
    every = [*talks, *([text] for text in kept), *compose(texts, job.composed)]
    missing, number = job.own_questions - len(kept), job.processes
    return [
        _Share(
            process=process,
            talks=every[process::number],
            num_new_questions=missing * (process + 1) // number - missing * process // number,
            known=frozenset(kept),
        )
        for process in range(number)
    ]


def _in_process(job: Job, share: _Share, threads: int, counts: MutableSequence[int], is_over: Event) -> None:
    """The body of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one tells the others
    torch.set_num_threads(threads)

    def told(done: int, of: int) -> None:
        counts[2 * share.process], counts[2 * share.process + 1] = done, of

    try:
        _answer(job, share, told, is_over.is_set)
    except ConfigError as error:
        raise SystemExit(f"process {share.process}: {error}") from None


def _answer(job: Job, share: _Share, told: AnswersDone, is_over: Callable[[], bool] = lambda: False) -> None:
    """Answer one share."""
    running = _engine(job)
    shards, began = _Shards(job.folder / "answers", share.process), time.monotonic()

    def is_enough() -> bool:
        return is_over() or (job.answers_s is not None and time.monotonic() - began > job.answers_s)

    try:
        talks = conversations([*share.talks, *([text] for text in _asked(job, share, running, is_enough))])
        done = {each.question: each.output for each in kept_answers(job)}
        longest = min(job.row_len, job.context - job.num_new)
        dialogue, total = Dialogue(talks, running.language, done, longest), sum(len(talk.turns) for talk in talks)
        stop_ids = running.language.tokenizer.eos_ids
        said = answer_all(running.engine, dialogue, num_new=job.num_new, stop_ids=stop_ids, at_once=job.at_once)
        for number, answer in enumerate(said, 1):
            shards.add(answer)
            told(number, total)
            if is_enough():
                break
        if dialogue.num_too_long and not done and not shards.num_added:
            raise ConfigError(f"--row-tokens {job.row_len}: every prompt has {longest} tokens or more, and no room")
    finally:
        shards.write()
        running.executor.close()


def _asked(job: Job, share: _Share, running: Running, is_enough: Callable[[], bool]) -> list[str]:
    """The questions that this process has the target ask."""
    if not share.num_new_questions:
        return []
    path = job.folder / f"questions-{share.process}.jsonl"
    return new_questions(
        running.engine,
        running.language,
        share.num_new_questions,
        path,
        at_once=job.at_once,
        process=share.process,
        known=share.known,
        is_enough=is_enough,
    )


def _engine(job: Job) -> Running:
    context = job.context
    return start(
        EngineConfig(
            model=ModelConfig(model=job.model, device=job.device, weights=job.weights),
            memory=MemoryConfig(pool_tokens=max(1, job.at_once // 2) * context),  # most are not that long
            sched=SchedConfig(max_running=job.at_once, chunk=CHUNK, context=context),
            spec=SpecConfig(spec="none"),
        )
    )


class _Shards:
    """Files of answers, written by one process: those of others have other names."""

    def __init__(self, folder: Path, process: int) -> None:
        self._folder, self._name = folder, f"answers-p{process}"
        self._fresh: list[TrainingAnswer] = []
        self.num_added = 0

    def add(self, answer: TrainingAnswer) -> None:
        """Add an answer; writes a file when there are enough."""
        self._fresh.append(answer)
        self.num_added += 1
        if len(self._fresh) == SHARD_ANSWERS:
            self.write()

    def write(self) -> None:
        """Write what was added since the last file."""
        if self._fresh:
            number = len(list(self._folder.glob(f"{self._name}-*.safetensors")))
            write_shard(self._folder / f"{self._name}-{number:04}.safetensors", self._fresh)
            self._fresh.clear()
