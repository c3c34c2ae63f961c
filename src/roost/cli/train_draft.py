"""Train a draft head for a model: from a file of prompts to a checkpoint for speculative decoding.

The model answers the prompts itself, and the head learns to predict the answers. Everything is kept in one folder, and
the same command resumes from there. Called by `main`.
"""

import signal
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import FrameType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from roost.cli.flag_parser import add_group, group_of
from roost.cli.prompts import read_turns
from roost.config.options import DEVICES
from roost.errors import ConfigError
from roost.startup import check_threads
from roost.train.answering import make_answers
from roost.train.job import VOCABULARY, Job, check
from roost.train.loop import Recipe, TrainingState
from roost.train.losses import LOSSES
from roost.train.pipeline import train_head

EXAMPLES = """\
  roost train-draft --prompts questions.jsonl --out my-head
  roost serve --draft my-head/head"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What is trained, on which data, and for how long."""

    model: str = field(default="default", metadata={"help": "the target: a GGUF file, a folder, or default"})
    device: str = field(default="auto", metadata={"help": "auto: cuda where there is one", "choices": DEVICES})
    threads: int | None = field(default=None, metadata={"help": "of a CPU; PyTorch's choice if absent"})
    prompts: str | None = field(
        default=None, metadata={"help": "a file of JSON or plain lines; if absent, only existing answers are used"}
    )
    own_questions: int = field(default=0, metadata={"help": "questions that the model asks itself, besides the file's"})
    composed: int = field(
        default=0,
        metadata={
            "help": "tasks composed of the texts of the file: summaries, translation, retrieval from long contexts, "
            "rewriting, JSON, calls of tools, conversations"
        },
    )
    out: str = field(
        default="draft-head", metadata={"help": "folder of the answers, the checkpoint, the log and the head"}
    )
    answer_tokens: int = field(default=512, metadata={"help": "most tokens of an answer"})
    answers_s: float | None = field(
        default=None, metadata={"help": "seconds that this run may spend on questions and answers; no limit if absent"}
    )
    at_once: int = field(default=32, metadata={"help": "prompts that a process answers concurrently"})
    processes: int = field(default=1, metadata={"help": "processes that answer at the same time, on the same device"})
    draft_vocabulary: int | None = field(
        default=None,
        metadata={
            "help": f"size of the head's vocabulary, the most frequent tokens; default: as before, or {VOCABULARY}"
        },
    )
    feed_size: int | None = field(
        default=None,
        metadata={"help": "width of the head's feed-forward, at least the model's; default: as before, or the model's"},
    )
    from_head: str | None = field(
        default=None,
        metadata={
            "help": "folder of a head to start from, with its sizes and, without --draft-vocabulary, its vocabulary; "
            "the model's own weights if absent"
        },
    )
    lm_head: str = field(
        default="bf16",
        metadata={
            "help": "how the head's output rows are stored; int8: half the bytes, but other engines do not read it",
            "choices": ("bf16", "int8"),
        },
    )
    row_tokens: int = field(default=1024, metadata={"help": "tokens of a packed row"})
    batch_rows: int = field(default=32, metadata={"help": "rows of a batch"})
    micro_rows: int | None = field(
        default=None, metadata={"help": "rows that are in memory at one time, a divisor of the batch's; default: all"}
    )
    loss: str = field(
        default="kl",
        metadata={
            "help": "kl: the model's distribution; coupled, match: also its greedy choice and what both draw with "
            "the same noise",
            "choices": LOSSES,
        },
    )
    epochs: int = field(default=10, metadata={"help": "passes over the data, including those of earlier runs"})
    train_s: float | None = field(
        default=None, metadata={"help": "seconds of training, including earlier runs; no limit if absent"}
    )
    learning_rate: float = field(default=5e-4, metadata={"help": "the peak of the schedule"})
    unrolled_steps: int = field(
        default=7, metadata={"help": "consecutive draft steps that are trained (training-time test)"}
    )
    train_seed: int = field(default=0, metadata={"help": "for the order of rows"})


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    add_group(parser, TrainConfig)


def run(args: Namespace) -> int:
    """Answer, then train."""
    config = group_of(args, TrainConfig)
    _check(config)
    talks = [] if config.prompts is None else read_turns(Path(config.prompts))
    job = Job(
        folder=Path(config.out),
        model=config.model,
        device=config.device,
        num_new=config.answer_tokens,
        at_once=config.at_once,
        processes=config.processes,
        own_questions=config.own_questions,
        composed=config.composed,
        answers_s=config.answers_s,
        row_len=config.row_tokens,
        vocabulary=config.draft_vocabulary,
        feed_size=config.feed_size,
        from_head=None if config.from_head is None else Path(config.from_head),
        lm_head=config.lm_head,
    )
    recipe = Recipe(
        num_steps=config.unrolled_steps,
        learning_rate=config.learning_rate,
        loss=config.loss,
        batch_rows=config.batch_rows,
        micro_rows=config.micro_rows,
        epochs=config.epochs,
        budget_s=config.train_s,
        seed=config.train_seed,
    )
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check(job, recipe)
    console = Console(stderr=True, highlight=False)
    if talks or config.own_questions or config.composed:
        with _bar(console, "answers") as (progress, task):
            make_answers(job, talks, lambda done, total: progress.update(task, completed=done, total=total))
    with _bar(console, "training") as (progress, task), _interruptible(console) as is_enough:
        standing = train_head(
            job, recipe, lambda now: _show(progress, task, now), lambda now: _tell(progress.console, now), is_enough
        )
    both = f"greedy {_shares(standing.best)}; drawn {_shares(standing.best_drawn)}"
    console.print(f"agreement of the best head on held-out answers, by draft: {both}")
    console.print(f"roost serve --model {config.model} --draft {job.folder / 'head'}", soft_wrap=True, markup=False)
    return 0


def _check(config: TrainConfig) -> None:
    """Raise ConfigError for the first number that is out of range."""
    check_threads(config.threads)
    least = {"answer_tokens": 1, "at_once": 1, "draft_vocabulary": 16, "row_tokens": 16, "batch_rows": 1, "epochs": 1}
    least |= {"unrolled_steps": 1, "train_seed": 0, "own_questions": 0, "composed": 0, "processes": 1}
    for name, smallest in {**least, "micro_rows": 1}.items():
        value = getattr(config, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
    if config.micro_rows is not None and config.batch_rows % config.micro_rows:
        raise ConfigError(f"--micro-rows must divide --batch-rows {config.batch_rows}, got {config.micro_rows}")
    if config.from_head is not None and config.feed_size is not None:
        raise ConfigError("--feed-size: the head of --from-head brings its own")
    for name in ("answers_s", "train_s", "learning_rate"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}")


@contextmanager
def _bar(console: Console, label: str) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(label, total=None)


@contextmanager
def _interruptible(console: Console) -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C into a request to stop after the current update, so that what was learned is kept."""
    requested = Event()

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        if not requested.is_set():
            requested.set()
            console.print("stopping after this update; the same command resumes from there")

    before = signal.signal(signal.SIGINT, request_stop)
    try:
        yield requested.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def _show(progress: Progress, task: TaskID, now: TrainingState) -> None:
    text = f"loss {now.loss:.2f}, agreement {_shares(now.agreement)}"
    progress.update(task, completed=now.update, total=now.num_updates, description=text)


def _tell(console: Console, now: TrainingState) -> None:
    both = f"greedy {_shares(now.held_out)}; drawn {_shares(now.held_out_drawn)}"
    when = f"update {now.update} of {now.num_updates}" if now.update else "at the start"
    console.print(f"{when}: held-out agreement {both}")


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)
