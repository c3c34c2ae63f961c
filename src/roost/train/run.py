"""A whole training: answers of the target, rows of them, a head that learns, and its checkpoint as it gets better.

Everything lies in one folder: `answers/`, `checkpoint.pt`, `log.jsonl`, and `head/`, the best head so far. What is
there already is not done again. Called by the training command.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from roost.config import EngineConfig, SpecConfig
from roost.errors import ConfigError
from roost.startup import start
from roost.train.answers import Answer, answer_all, questions, read_shards, write_shard
from roost.train.head import TrainableHead
from roost.train.loop import LOOK_EVERY, Recipe, Report, Standing, Trainer
from roost.train.rows import draft_vocabulary, pack, split
from roost.train.start import head_shape, warm_start, write_head
from roost.weights.draft import default_captures
from roost.weights.load import load_model, open_source
from roost.weights.pull import find_model

SHARD_ANSWERS = 4096
HELD_OUT_SEED = 0  # the same prompts in every run: what one run learned from, another may not be tried on
ALWAYS = (0, 1, 2)  # ids that are in every draft vocabulary: where the specials are

Told = Callable[[int, int], None]  # so many of so many answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, on what, and where it lies."""

    folder: Path
    num_new: int = 512  # tokens of an answer, at most
    row_len: int = 1024
    vocabulary: int = 8192
    held_out: float = 0.02  # share of the prompts whose answers are not learned from
    answers_s: float | None = None  # budget of seconds for the answers


def make_answers(config: EngineConfig, texts: Sequence[str], job: Job, told: Told) -> None:
    """Have the target answer what it has not answered yet, until the budget is spent."""
    folder = job.folder / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    shards = sorted(folder.glob("*.npz"))
    done = frozenset(each.number for each in read_shards(shards))
    running = start(replace(config, spec=SpecConfig(spec="none")))
    prompts = [running.language.chat_tokens([{"role": "user", "content": text}]) for text in texts]
    asked = [each for each in questions(prompts, done) if len(each.prompt) < job.row_len]
    fresh: list[Answer] = []
    began, total = time.monotonic(), len(asked) + len(done)

    def put_away() -> None:
        number = len(list(folder.glob("*.npz")))
        write_shard(folder / f"answers-{number:04}.npz", fresh)
        fresh.clear()

    stop_ids, at_once = running.language.tokenizer.eos_ids, running.resolved.sched.max_running
    try:
        for number, answer in enumerate(
            answer_all(running.engine, asked, num_new=job.num_new, stop_ids=stop_ids, at_once=at_once), 1
        ):
            fresh.append(answer)
            told(len(done) + number, total)
            if len(fresh) == SHARD_ANSWERS:
                put_away()
            if job.answers_s is not None and time.monotonic() - began > job.answers_s:
                break
    finally:
        if fresh:
            put_away()
        running.executor.close()


def train_head(model_name: str, device: torch.device, job: Job, recipe: Recipe, report: Report) -> Standing:
    """Train on the answers that there are, from where the last run stopped."""
    answers = read_shards(sorted((job.folder / "answers").glob("*.npz")))
    sound = [each for each in answers if not each.is_looping]
    if not sound:
        raise ConfigError("--out: there are no answers to learn from; give --prompts")
    _, path = find_model(model_name)
    source = open_source(path)
    model = load_model(source, weights="bf16" if device.type == "cuda" else "fp32", device=device)
    vocabulary, covered = _vocabulary(job, sound, device, model.config.vocab_size)
    shape = head_shape(model.config, len(default_captures(len(model.config.layers))), len(vocabulary))
    head = TrainableHead(shape, warm_start(source, model.config, shape, vocabulary), device)
    learn, held_out = (pack(part, job.row_len) for part in split(sound, job.held_out, HELD_OUT_SEED))
    if len(learn) < recipe.batch_rows:
        raise ConfigError(f"--batch-rows {recipe.batch_rows}: the answers fill only {len(learn)} rows; lower it")
    trainer = Trainer(model, head, default_captures(len(model.config.layers)), vocabulary, recipe)
    log = _Log(job.folder / "log.jsonl")
    log.write(
        answers=len(answers),
        looping=len(answers) - len(sound),
        rows=len(learn),
        held_out=len(held_out),
        covered=covered,
    )
    if (job.folder / "checkpoint.pt").exists():
        trainer.load(job.folder / "checkpoint.pt")

    def reported(standing: Standing) -> None:
        report(standing)
        if standing.update % LOOK_EVERY == 1:
            log.standing(standing)

    def keep(state: dict[str, Tensor], standing: Standing) -> None:
        write_head(job.folder / "head", state, shape, vocabulary)
        log.standing(standing)

    trainer.train(learn, held_out, report=reported, keep=keep, checkpoint=job.folder / "checkpoint.pt")
    return trainer.standing


def _vocabulary(job: Job, answers: Sequence[Answer], device: torch.device, vocab_size: int) -> tuple[Tensor, float]:
    """The draft vocabulary, which stays what it was when training goes on, and the share of the answers it covers."""
    path = job.folder / "vocabulary.npy"
    ids, covered = draft_vocabulary(answers, min(job.vocabulary, vocab_size), ALWAYS)
    if path.exists():
        ids = np.load(path)
    else:
        np.save(path, ids)
    return torch.from_numpy(ids).to(device), covered


class _Log:
    """A file of what happened, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **what: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def standing(self, standing: Standing) -> None:
        self.write(
            update=standing.update,
            of=standing.num_updates,
            spent_s=round(standing.spent_s, 1),
            loss=round(standing.loss, 4),
            agreement=[round(each, 4) for each in standing.agreement],
            held_out=[round(each, 4) for each in standing.held_out],
            best=round(standing.best, 4),
        )
