"""The training pipeline: from the target's answers to packed rows, a head that learns, and its checkpoint.

Everything is kept in one folder: `job.json`, `answers/`, `checkpoint.safetensors`, `log.jsonl`, and `head/`, the best
head so far. What is there already is not computed again. Called by the training command.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from roost.config.options import EngineConfig, ModelConfig
from roost.errors import ConfigError
from roost.models.decoder_layers import DecoderConfig
from roost.startup import backend_of, device_of, ops_of
from roost.train.answering import kept_answers
from roost.train.answers import TrainingAnswer
from roost.train.head import HeadShape, TrainableHead
from roost.train.head_checkpoint import GivenHead, head_shape, read_head, warm_start, with_vocabulary, write_head
from roost.train.job import Job, noted_of, read_note, write_whole
from roost.train.loop import REPORT_EVERY, Recipe, Report, Trainer, TrainingState
from roost.train.packing import draft_vocabulary, pack, share_said, split
from roost.weights.draft import default_aux_layers
from roost.weights.load import load_decoder, open_source
from roost.weights.pull import find_model

_JUDGED = ("held_out", "held_out_drawn", "best", "best_drawn")
ALWAYS = (0, 1, 2)  # ids in every draft vocabulary: usually special tokens
CHECKPOINT = "checkpoint.safetensors"


def train_head(
    job: Job, recipe: Recipe, report: Report, evaluated: Report, is_enough: Callable[[], bool] = lambda: False
) -> TrainingState:
    """Train on the answers that there are, from where the last run stopped."""
    answers = kept_answers(job)
    learn, held_out = split([each for each in answers if not each.is_looping], job.held_out)
    _refuse_too_few(job, answers, learn)
    device, source = device_of(ModelConfig(device=job.device)), open_source(find_model(job.model)[1])
    ops = ops_of(backend_of(EngineConfig(), device))
    model = load_decoder(source, weights=job.weights, device=device, ops=ops)
    given = None if job.from_head is None else read_head(job.from_head)
    rows, held_out_rows = pack(learn, job.row_len), pack(held_out, job.row_len)
    if len(rows) < recipe.batch_rows:
        raise ConfigError(
            f"--batch-rows {recipe.batch_rows}: the answers fill {len(rows)} rows; lower it, or answer more prompts"
        )
    noted = noted_of(job)
    assert noted is not None, "the job was not checked"
    vocabulary = _vocabulary(job, learn, noted["draft_vocabulary"], given)
    aux_layers = default_aux_layers(len(model.config.layers))
    shape = head_shape(model.config, len(aux_layers), len(vocabulary), noted["feed_size"])
    state = _first_weights(source, model.config, shape, vocabulary, given)
    trainer = Trainer(model, TrainableHead(shape, state, device), aux_layers, vocabulary.to(device), recipe)
    checkpoint, kept_head = job.folder / CHECKPOINT, job.folder / "head"
    if checkpoint.exists():
        try:
            trainer.load(checkpoint)
        except SafetensorError as error:
            raise ConfigError(f"--out {job.folder}: {checkpoint.name} cannot be read: {error}") from error
    if kept_head.exists():
        trainer.evaluate_kept(read_head(kept_head).weights, held_out_rows)
    else:
        trainer.standing.best, trainer.standing.best_drawn, trainer.standing.best_on = (), (), ""
    log = _Log(job.folder / "log.jsonl")
    log.write(
        answers=len(answers),
        looping=len(answers) - len(learn) - len(held_out),
        rows=len(rows),
        held_out_rows=len(held_out_rows),
    )

    def reported(standing: TrainingState) -> None:
        report(standing)
        if standing.update % REPORT_EVERY == 1:
            log.standing(standing)

    def kept(standing: TrainingState, state: dict[str, Tensor] | None) -> None:
        if state is not None:
            write_head(kept_head, state, shape, vocabulary, job.lm_head)
        log.standing(standing)
        evaluated(standing)

    if not trainer.standing.update:  # what training starts from
        trainer.standing.judge(trainer.agreement(held_out_rows))
        kept(trainer.standing, None)
    trainer.train(rows, held_out_rows, report=reported, evaluated=kept, checkpoint=checkpoint, is_enough=is_enough)
    return trainer.standing


def _refuse_too_few(job: Job, answers: Sequence[TrainingAnswer], learn: Sequence[TrainingAnswer]) -> None:
    if not answers:
        raise ConfigError(f"--out {job.folder}: there are no answers to learn from; give --prompts or --own-questions")
    if not learn:
        raise ConfigError(
            f"--out {job.folder}: of {len(answers)} answers none is left to learn from: some prompts are held out, and "
            "looping answers are left out; answer more prompts"
        )


def _vocabulary(job: Job, learn: Sequence[TrainingAnswer], size: int, given: GivenHead | None) -> Tensor:
    """The draft vocabulary, that of the given head unless another was asked for; later runs keep it."""
    path = job.folder / "vocabulary.json"
    if not path.exists():
        is_given = given is not None and job.vocabulary is None and size == len(given.vocabulary)
        ids = (given.vocabulary if given and is_given else draft_vocabulary(learn, size, ALWAYS)).tolist()
        write_whole(path, json.dumps({"covered": share_said(learn, ids), "ids": ids}) + "\n")
    return torch.tensor(read_note(path)["ids"])


def _first_weights(
    source: Mapping[str, Tensor], target: DecoderConfig, shape: HeadShape, vocabulary: Tensor, given: GivenHead | None
) -> Mapping[str, Tensor]:
    if given is None:
        return warm_start(source, target, shape, vocabulary)
    if torch.equal(given.vocabulary, vocabulary):
        return given.weights
    return with_vocabulary(given, source, target, vocabulary)


class _Log:
    """The log file, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **what: object) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def standing(self, standing: TrainingState) -> None:
        self.write(
            update=standing.update,
            of=standing.num_updates,
            spent_s=round(standing.spent_s, 1),
            loss=round(standing.loss, 4),
            agreement=[round(each, 4) for each in standing.agreement],
            **{name: [round(each, 4) for each in getattr(standing, name)] for name in _JUDGED},
        )
