"""The training loop of a draft head: lessons of the target, unrolled steps, a schedule, checkpoints.

Stops on a budget of seconds or after some epochs; goes on from its last checkpoint; keeps the head that agreed best with
the target on rows it was not trained on. Called by the training command and by tests.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import cos, pi
from pathlib import Path

import torch
from torch import Tensor

from roost.models.decoder import Decoder
from roost.train.head import TrainableHead, unroll
from roost.train.rows import Rows
from roost.train.target import Lesson, teach


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained."""

    num_steps: int = 7  # unrolled
    step_weight: float = 0.8  # of the loss of each further step
    learning_rate: float = 5e-4
    warm_up: float = 0.03  # share of all updates
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    batch_rows: int = 16
    epochs: int = 10
    budget_s: float | None = None
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far training is."""

    update: int = 0
    num_updates: int = 0
    spent_s: float = 0.0
    loss: float = 0.0
    agreement: tuple[float, ...] = ()  # of each step, on the last batch
    best: float = 0.0  # sum of the agreements on held-out rows


Report = Callable[[Progress], None]


class Trainer:
    """A head, its target and where training stands."""

    def __init__(
        self, model: Decoder, head: TrainableHead, captures: tuple[int, ...], vocabulary: Tensor, recipe: Recipe
    ) -> None:
        self._model, self.head, self._captures, self._vocabulary = model, head, captures, vocabulary
        self._recipe = recipe
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.learning_rate, betas=recipe.betas)
        self.progress = Progress()
        device = vocabulary.device
        self._own_id = torch.full((model.config.vocab_size,), -1, device=device)  # of a target's token
        self._own_id[vocabulary] = torch.arange(len(vocabulary), device=device)

    def train(self, rows: Rows, held_out: Rows, report: Report, folder: Path | None = None) -> None:
        """Run updates until the epochs or the budget are over."""
        recipe, progress = self._recipe, self.progress
        per_epoch = len(rows) // recipe.batch_rows
        progress.num_updates = recipe.epochs * per_epoch
        began, spent = time.monotonic(), progress.spent_s
        for epoch in range(progress.update // max(1, per_epoch), recipe.epochs):
            for number, batch in enumerate(rows.batches(recipe.batch_rows, recipe.seed + epoch)):
                if epoch * per_epoch + number < progress.update:
                    continue  # done before an interruption
                self._update(batch)
                progress.spent_s = spent + time.monotonic() - began
                report(progress)
                if recipe.budget_s is not None and time.monotonic() - began > recipe.budget_s:
                    self._keep(held_out, folder)
                    return
            self._keep(held_out, folder)

    def agreement(self, rows: Rows) -> tuple[float, ...]:
        """Share of places where each step's best token is the target's, over whole batches of rows."""
        sums, counts = torch.zeros(self._recipe.num_steps), torch.zeros(self._recipe.num_steps)
        for batch in rows.batches(min(self._recipe.batch_rows, len(rows)), 0):
            with torch.no_grad():
                for step, (logits, lesson) in enumerate(self._steps(batch)):
                    right, counted = self._right(logits, lesson)
                    sums[step] += right.cpu()
                    counts[step] += counted.cpu()
        return tuple((sums / counts.clamp(min=1)).tolist())

    def save(self, path: Path) -> None:
        """A checkpoint to go on from."""
        state = {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**state, "progress": asdict(self.progress), "recipe": asdict(self._recipe)}, path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, map_location=self._vocabulary.device, weights_only=True)
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**{**state["progress"], "agreement": tuple(state["progress"]["agreement"])})

    def _update(self, batch: Rows) -> None:
        recipe, progress = self._recipe, self.progress
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule(progress.update, progress.num_updates, recipe.warm_up)
        loss, agreements = torch.zeros((), device=self._vocabulary.device), []
        for step, (logits, lesson) in enumerate(self._steps(batch)):
            loss = loss + recipe.step_weight**step * self._loss(logits, lesson)
            right, counted = self._right(logits, lesson)
            agreements.append(right / counted.clamp(min=1))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        self._optimizer.step()
        progress.update += 1
        if progress.update % 20 == 1:  # to look at them is to wait for the device
            progress.loss, progress.agreement = float(loss.detach()), tuple(torch.stack(agreements).tolist())

    def _steps(self, batch: Rows) -> Iterator[tuple[Tensor, "Step"]]:
        """Of each unrolled step its logits and what they are held against."""
        device = self._vocabulary.device
        tokens, owners, is_said = (
            torch.from_numpy(column).to(device) for column in (batch.tokens, batch.owners, batch.is_said)
        )
        tokens, number = tokens.to(torch.int64), self._recipe.num_steps
        lesson = teach(self._model, tokens, owners, self._captures, self._vocabulary)
        embedded = [
            self._model.embed(shifted(tokens, 1 + step).flatten()).unflatten(0, tokens.shape) for step in range(number)
        ]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            fused = self.head.fuse(lesson.features.to(self.head_dtype))
            found = unroll(self.head, [each.to(self.head_dtype) for each in embedded], fused, lesson.seen)
        for step, logits in enumerate(found):
            yield logits, Step.of(lesson, owners, is_said, self._own_id, step)

    @property
    def head_dtype(self) -> torch.dtype:
        """What its inputs are given in."""
        return torch.float32

    def _loss(self, logits: Tensor, step: "Step") -> Tensor:
        """Forward KL to the target's distribution over the draft vocabulary, over the places that count."""
        wanted = step.scores.to(torch.float32).softmax(dim=-1)
        losses = -(wanted * logits.to(torch.float32).log_softmax(dim=-1)).sum(-1)
        return (losses * step.counts).sum() / step.counts.sum().clamp(min=1)

    def _right(self, logits: Tensor, step: "Step") -> tuple[Tensor, Tensor]:
        best = self._vocabulary[logits.argmax(dim=-1)]
        return ((best == step.best) & step.is_said).sum(), step.is_said.sum()

    def _keep(self, held_out: Rows, folder: Path | None) -> None:
        """Look at held-out rows; keep the head if it is the best so far."""
        score = sum(self.agreement(held_out))
        is_best = score > self.progress.best
        self.progress.best = max(score, self.progress.best)
        if folder is not None:
            self.save(folder / "checkpoint.pt")
            if is_best:
                torch.save(self.head.state(), folder / "best.pt")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What one unrolled step is held against: place t of step j guesses the token at t + 2 + j."""

    scores: Tensor  # [num_rows, row_len, num_tokens] the target's, over the draft vocabulary
    best: Tensor  # [num_rows, row_len] the target's best token
    is_said: Tensor  # [num_rows, row_len] bool: that token is in the same answer, and said by the target
    counts: Tensor  # [num_rows, row_len] the same, where the head can say it; 0 or 1

    @classmethod
    def of(cls, lesson: Lesson, owners: Tensor, is_said: Tensor, own_id: Tensor, step: int) -> "Step":
        """The lesson as a step sees it."""
        number, row_len = 1 + step, owners.shape[1]
        place = torch.arange(row_len, device=owners.device)
        same = (shifted(owners, number + 1) == owners) & (owners >= 0) & (place + number + 1 < row_len)
        said = same & shifted(is_said, number + 1)
        best = shifted(lesson.best, number)
        counts = said & (own_id[best] >= 0)
        return cls(scores=shifted(lesson.scores, number), best=best, is_said=said, counts=counts.to(torch.float32))


def shifted(values: Tensor, number: int) -> Tensor:
    """Each row moved to the left by so many places; what comes in at the end means nothing."""
    return values.roll(-number, dims=1)


def schedule(update: int, num_updates: int, warm_up: float) -> float:
    """Share of the learning rate: up from nothing, then down along a cosine to a tenth."""
    first = max(1, int(warm_up * num_updates))
    if update < first:
        return (update + 1) / first
    done = (update - first) / max(1, num_updates - first)
    return 0.1 + 0.9 * 0.5 * (1 + cos(pi * min(1.0, done)))


def with_budget(recipe: Recipe, budget_s: float | None) -> Recipe:
    """A recipe that stops in time."""
    return replace(recipe, budget_s=budget_s)
