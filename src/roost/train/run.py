"""A whole training: answers of the target, rows of them, a head that learns, and its checkpoint as it gets better.

Everything lies in one folder: `job.json`, `answers/`, `checkpoint.safetensors`, `log.jsonl`, and `head/`, the best head
so far. What is there already is not done again, and belongs to one model. Called by the training command.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from roost.config import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SpecConfig
from roost.errors import ConfigError
from roost.models.registry import decoder_config
from roost.startup import backend_of, device_of, ops_of, start
from roost.text.language import Language
from roost.train.answers import Answer, answer_all, questions, read_shards, write_shard
from roost.train.ask import own_questions
from roost.train.head import TrainableHead
from roost.train.loop import LOOK_EVERY, Recipe, Report, Standing, Trainer
from roost.train.rows import draft_vocabulary, pack, share_said, split
from roost.train.start import head_shape, read_head, warm_start, write_head
from roost.weights.draft import default_captures
from roost.weights.load import load_model, open_source
from roost.weights.pull import find_model

SHARD_ANSWERS = 4096
CHUNK = 8192  # tokens of prompts in a step
ALWAYS = (0, 1, 2)  # ids that are in every draft vocabulary: where the specials are
CHECKPOINT = "checkpoint.safetensors"

Told = Callable[[int, int], None]  # so many of so many answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be trained, on what, and where it lies."""

    folder: Path
    model: str = "default"
    device: str = "auto"
    num_new: int = 512  # tokens of an answer, at most
    at_once: int = 32  # prompts
    own_questions: int = 0  # that the target asks itself
    answers_s: float | None = None  # budget of seconds for the answers
    row_len: int = 1024
    vocabulary: int = 8192
    feed_size: int | None = None  # of the head's feed-forward; the target's if absent
    from_head: Path | None = None  # a head to go on from, with its vocabulary and its sizes
    held_out: float = 0.02  # share of the prompts whose answers are not learned from

    @property
    def weights(self) -> str:
        """The form of the target's weights: the same for answers and lessons."""
        return "bf16" if device_of(ModelConfig(device=self.device)).type == "cuda" else "fp32"


def check(job: Job) -> None:
    """Refuse what cannot work, before anything is answered; note whose folder it is."""
    name, path = find_model(job.model)
    config = decoder_config(open_source(path).config())
    default_captures(len(config.layers))
    if job.row_len > config.context_max:
        raise ConfigError(f"--row-tokens must be at most the model's context, {config.context_max}, got {job.row_len}")
    if job.from_head is not None and (job.folder / CHECKPOINT).exists():
        raise ConfigError(f"--from-head: --out {job.folder} has a checkpoint to go on from; use another folder")
    job.folder.mkdir(parents=True, exist_ok=True)
    given = None if job.from_head is None else read_head(job.from_head)
    feed_size = config.intermediate_size if job.feed_size is None else job.feed_size
    if feed_size < config.intermediate_size:
        raise ConfigError(f"--feed-size must be at least the model's, {config.intermediate_size}, got {feed_size}")
    mine: dict[str, object] = {
        "model": name,
        "draft_vocabulary": min(job.vocabulary, config.vocab_size) if given is None else len(given.vocabulary),
        "feed_size": feed_size if given is None else given.feed_size,
    }
    note = job.folder / "job.json"
    if not note.exists():
        note.write_text(json.dumps(mine) + "\n")
    theirs = json.loads(note.read_text())
    for flag, value in mine.items():
        if theirs[flag] != value:
            raise ConfigError(
                f"--{flag.replace('_', '-')}: what lies in --out {job.folder} was made with {theirs[flag]}, got "
                f"{value}; use another folder"
            )


def make_answers(job: Job, texts: Sequence[str], told: Told) -> None:
    """Have the target answer what it has not answered yet, its own questions too, until the budget is spent."""
    folder = job.folder / "answers"
    folder.mkdir(exist_ok=True)
    done = frozenset(each.question for each in _answers(job))
    context = min(job.row_len + job.num_new, decoder_config(open_source(find_model(job.model)[1]).config()).context_max)
    running = start(
        EngineConfig(
            model=ModelConfig(model=job.model, device=job.device, weights=job.weights),
            memory=MemoryConfig(pool_tokens=max(1, job.at_once // 2) * context),  # most are not that long
            sched=SchedConfig(max_running=job.at_once, chunk=CHUNK, context=context),
            spec=SpecConfig(spec="none"),
        )
    )
    own = own_questions(
        running.engine, running.language, job.own_questions, job.folder / "questions.jsonl", job.at_once
    )
    prompts = [_prompt(running.language, text) for text in (*texts, *own)]
    asked = [each for each in questions(prompts, done) if len(each.prompt) < min(job.row_len, context)]
    fresh: list[Answer] = []
    began, stop_ids = time.monotonic(), running.language.tokenizer.eos_ids

    def put_away() -> None:
        if fresh:
            number = len(list(folder.glob("*.safetensors")))
            write_shard(folder / f"answers-{number:04}.safetensors", fresh)
            fresh.clear()

    try:
        said = answer_all(running.engine, asked, num_new=job.num_new, stop_ids=stop_ids, at_once=job.at_once)
        for number, answer in enumerate(said, 1):
            fresh.append(answer)
            told(len(done) + number, len(done) + len(asked))
            if len(fresh) == SHARD_ANSWERS:
                put_away()
            if job.answers_s is not None and time.monotonic() - began > job.answers_s:
                break
    finally:
        put_away()
        running.executor.close()


def train_head(
    job: Job, recipe: Recipe, report: Report, looked: Report, is_enough: Callable[[], bool] = lambda: False
) -> Standing:
    """Train on the answers that there are, from where the last run stopped."""
    answers = _answers(job)
    learn, held_out = split([each for each in answers if not each.is_looping], job.held_out)
    if not learn:
        raise ConfigError(f"--out {job.folder}: there are no answers to learn from; give --prompts or --own-questions")
    device, source = device_of(ModelConfig(device=job.device)), open_source(find_model(job.model)[1])
    ops = ops_of(backend_of(EngineConfig(), device))
    model = load_model(source, weights=job.weights, device=device, ops=ops)
    given = None if job.from_head is None else read_head(job.from_head)
    vocabulary = _vocabulary(job, learn, model.config.vocab_size, None if given is None else given.vocabulary)
    captures = default_captures(len(model.config.layers))
    feed_size = json.loads((job.folder / "job.json").read_text())["feed_size"]
    shape = head_shape(model.config, len(captures), len(vocabulary), feed_size)
    state = warm_start(source, model.config, shape, vocabulary)
    if given is not None:
        state = _like(given.weights, state)
    head = TrainableHead(shape, state, device)
    rows, aside = pack(learn, job.row_len), pack(held_out, job.row_len)
    if len(rows) < recipe.batch_rows:
        raise ConfigError(
            f"--batch-rows {recipe.batch_rows}: the answers fill {len(rows)} rows; lower it, or answer more prompts"
        )
    trainer = Trainer(model, head, captures, vocabulary.to(device), recipe)
    if (job.folder / CHECKPOINT).exists():
        trainer.load(job.folder / CHECKPOINT)
    if not (job.folder / "head").exists():
        trainer.standing.best = ()
    log = _Log(job.folder / "log.jsonl")
    log.write(
        answers=len(answers),
        looping=len(answers) - len(learn) - len(held_out),
        rows=len(rows),
        held_out_rows=len(aside),
    )

    def reported(standing: Standing) -> None:
        report(standing)
        if standing.update % LOOK_EVERY == 1:
            log.standing(standing)

    def kept(standing: Standing, state: dict[str, Tensor] | None) -> None:
        if state is not None:
            write_head(job.folder / "head", state, shape, vocabulary)
        log.standing(standing)
        looked(standing)

    checkpoint = job.folder / CHECKPOINT
    trainer.train(rows, aside, report=reported, looked=kept, checkpoint=checkpoint, is_enough=is_enough)
    return trainer.standing


def _answers(job: Job) -> list[Answer]:
    return read_shards(sorted((job.folder / "answers").glob("*.safetensors")))


def _prompt(language: Language, text: str) -> tuple[int, ...]:
    """A user's message, or a plain text for a model that knows no conversations."""
    if language.template is None:
        return language.prompt_tokens(text)
    return language.chat_tokens([{"role": "user", "content": text}])


def _vocabulary(job: Job, learn: Sequence[Answer], vocab_size: int, given: Tensor | None) -> Tensor:
    """The draft vocabulary, that of a head that is gone on from if there is one; it stays when training goes on."""
    path = job.folder / "vocabulary.json"
    if not path.exists():
        size = min(job.vocabulary, vocab_size)
        ids = (draft_vocabulary(learn, size, ALWAYS) if given is None else given).tolist()
        path.write_text(json.dumps({"covered": share_said(learn, ids), "ids": ids}) + "\n")
    return torch.tensor(json.loads(path.read_text())["ids"])


def _like(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a head, if they have the names and sizes that are wanted."""
    for name, tensor in wanted.items():
        if name not in state or state[name].shape != tensor.shape:
            found = tuple(state[name].shape) if name in state else "none"
            raise ConfigError(f"--from-head: {name} must be {tuple(tensor.shape)} for this model, got {found}")
    return {name: state[name] for name in wanted}


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
            best=[round(each, 4) for each in standing.best],
        )
