"""The training loop of a draft head: lessons of the target, unrolled steps, a schedule, checkpoints.

Stops after some epochs or on a budget of seconds; goes on from its last checkpoint, along the same schedule. Hands out
the head whenever it agrees better than ever with the target on rows that it was not trained on. Called by the
training command and by tests.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import cos, pi
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from roost.models.decoder import Decoder
from roost.train.head import TrainableHead, fused
from roost.train.rows import Rows
from roost.train.target import Lesson, teach

SAVE_EVERY_S = 300.0
LOOK_EVERY = 20  # updates: to look at the loss is to wait for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained."""

    num_steps: int = 7  # unrolled
    step_weight: float = 0.8  # of the loss of each further step
    learning_rate: float = 5e-4
    warm_up: float = 0.03  # share of the run
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    batch_rows: int = 32
    epochs: int = 10
    budget_s: float | None = None
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Standing:
    """How far training is."""

    update: int = 0
    num_updates: int = 0
    spent_s: float = 0.0
    compiling_s: float = 0.0  # of those, for the first updates of runs
    loss: float = 0.0
    agreement: tuple[float, ...] = ()  # of each step, on the last batch that was looked at
    held_out: tuple[float, ...] = ()  # of each step, on held-out rows
    best: tuple[float, ...] = ()  # of each step, on held-out rows, of the best head
    best_on: str = ""  # which rows those were


Report = Callable[[Standing], None]
Looked = Callable[[Standing, dict[str, Tensor] | None], None]  # with the head, if it is the best so far


class Trainer:
    """A head, its target and where training stands."""

    def __init__(
        self, model: Decoder, head: TrainableHead, aux_layers: tuple[int, ...], vocabulary: Tensor, recipe: Recipe
    ) -> None:
        self._model, self.head, self._aux_layers, self._vocabulary = model, head, aux_layers, vocabulary
        self._recipe = recipe
        self._device = vocabulary.device
        on_gpu = self._device.type == "cuda"
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=recipe.betas, fused=on_gpu)
        self._judge = fused(self._judged, self._device)
        self.standing = Standing()
        self._own_id = torch.full((model.config.vocab_size,), -1, device=self._device)  # of a target's token
        self._own_id[vocabulary] = torch.arange(len(vocabulary), device=self._device)

    def train(
        self,
        rows: Rows,
        held_out: Rows,
        *,
        report: Report,
        looked: Looked,
        checkpoint: Path | None = None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run updates until the epochs or the budget are over, or it is enough; look at held-out rows after each epoch.

        What earlier runs did counts: a run that was interrupted goes on along the same schedule.
        """
        recipe, standing = self._recipe, self.standing
        per_epoch = max(1, len(rows) // recipe.batch_rows)
        standing.num_updates = recipe.epochs * per_epoch
        began, before, first, saved = time.monotonic(), standing.spent_s, standing.update, 0.0
        try:
            for batch in self._batches(rows, first):
                spent = time.monotonic() - began
                standing.spent_s = before + spent
                if standing.update == first + 1:
                    standing.compiling_s += spent
                if (recipe.budget_s is not None and standing.spent_s > recipe.budget_s) or is_enough():
                    break
                self._update(batch, schedule(self._done(), recipe.warm_up))
                report(standing)
                if standing.update % per_epoch == 0 and standing.update < standing.num_updates:
                    self._look(held_out, looked)
                if checkpoint is not None and spent - saved > SAVE_EVERY_S:
                    self.save(checkpoint)
                    saved = spent
            self._look(held_out, looked)
        finally:
            if checkpoint is not None:
                self.save(checkpoint)

    def judge_kept(self, state: Mapping[str, Tensor], held_out: Rows) -> None:
        """Take a head that was kept earlier as the best so far, on the rows that are held out now."""
        if self.standing.best_on == held_out.key:
            return
        mine = {name: tensor.clone() for name, tensor in self.head.state().items()}
        self.head.load(state)
        self.standing.best, self.standing.best_on = self.agreement(held_out), held_out.key
        self.head.load(mine)

    def agreement(self, rows: Rows) -> tuple[float, ...]:
        """Share of places where each step's best token is the target's, over whole batches of rows."""
        sums = torch.zeros(2, self._recipe.num_steps, device=self._device)
        for batch in rows.batches(min(self._recipe.batch_rows, len(rows)), 0):
            _, right, counted = self._study(batch)
            sums += torch.stack([right, counted])
        right, counted = sums
        return tuple((right / counted.clamp(min=1)).tolist())

    def save(self, path: Path) -> None:
        """A checkpoint to go on from: weights, what the optimizer keeps of each, and the standing."""
        tensors = {}
        for name, weight in self.head.named_parameters():
            tensors[f"weight/{name}"] = weight.detach()
            tensors |= {f"{kind}/{name}": tensor for kind, tensor in self._optimizer.state[weight].items()}
        part = path.with_name(path.name + ".part")
        whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, part, metadata={"standing": json.dumps(asdict(self.standing))})
        part.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        with safe_open(path, "pt") as file:
            self.standing = Standing(**json.loads(file.metadata()["standing"]))
            names = set(file.keys())
            for name, weight in self.head.named_parameters():
                weight.data.copy_(file.get_tensor(f"weight/{name}"))
                kept = {kind: f"{kind}/{name}" for kind in ("step", "exp_avg", "exp_avg_sq")}
                if set(kept.values()) <= names:
                    device = self._device
                    self._optimizer.state[weight] = {
                        kind: file.get_tensor(each).to(device) for kind, each in kept.items()
                    }

    def _done(self) -> float:
        """How much of the training is done, by its budget or by its epochs; compiling is not learning."""
        standing, budget_s = self.standing, self._recipe.budget_s
        by_count = standing.update / standing.num_updates
        if budget_s is None:
            return by_count
        spent, whole = (each - standing.compiling_s for each in (standing.spent_s, budget_s))
        return max(by_count, spent / max(whole, 1e-9))

    def _batches(self, rows: Rows, first: int) -> Iterator[Rows]:
        """Batches of all epochs, from one on."""
        recipe, number = self._recipe, 0
        for epoch in range(recipe.epochs):
            for batch in rows.batches(recipe.batch_rows, recipe.seed + epoch):
                if number >= first:
                    yield batch
                number += 1

    def _update(self, batch: Rows, share: float) -> None:
        recipe, standing = self._recipe, self.standing
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * share
        loss, right, counted = self._study(batch)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        self._optimizer.step()
        standing.update += 1
        if standing.update % LOOK_EVERY == 1:
            standing.loss, standing.agreement = float(loss.detach()), tuple((right / counted.clamp(min=1)).tolist())

    def _study(self, batch: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a batch, and of each step in how many places it is right, of how many that the target said."""
        tokens, owners, is_said = (
            torch.from_numpy(column).to(self._device) for column in (batch.tokens, batch.owners, batch.is_said)
        )
        lesson = teach(self._model, tokens.to(torch.int64), owners, self._aux_layers, self._vocabulary)
        return self._judge(lesson, owners, is_said)

    def _judged(self, lesson: Lesson, owners: Tensor, is_said: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        device, num_steps = self._device, self._recipe.num_steps
        embedded = [shifted(lesson.embedded, 1 + step).to(torch.float32) for step in range(num_steps)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            found = self.head.unroll(embedded, lesson.features.to(torch.float32), lesson.seen)
        loss, rights, counted = torch.zeros((), device=device), [], []
        for number, logits in enumerate(found):
            step = Step.of(lesson, owners, is_said, self._own_id, number)
            loss = loss + self._recipe.step_weight**number * divergence(logits, step.scores, step.counts)
            best = self._vocabulary[logits.detach().argmax(dim=-1)]
            rights.append(((best == step.best) & step.is_said).sum())
            counted.append(step.is_said.sum())
        return loss, torch.stack(rights), torch.stack(counted)

    def _look(self, held_out: Rows, looked: Looked) -> None:
        """Try held-out rows; hand the head out if it is the best so far on them."""
        standing = self.standing
        standing.held_out, before = self.agreement(held_out), (standing.best, standing.best_on)
        is_best = standing.best_on != held_out.key or right_in_a_row(standing.held_out) > right_in_a_row(standing.best)
        if is_best:
            standing.best, standing.best_on = standing.held_out, held_out.key
        try:
            looked(standing, self.head.state() if is_best else None)
        except BaseException:  # then there is no such head
            standing.best, standing.best_on = before
            raise


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


def divergence(logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
    """Forward KL to the target over the draft vocabulary, but for the target's entropy; the mean where it counts."""
    logits, wanted = logits.to(torch.float32), scores.to(torch.float32).softmax(dim=-1)
    losses = logits.logsumexp(dim=-1) - (wanted * logits).sum(-1)
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def shifted(values: Tensor, number: int) -> Tensor:
    """Each row moved to the left by so many places; what comes in at the end means nothing."""
    return values.roll(-number, dims=1)


def schedule(done: float, warm_up: float) -> float:
    """Share of the learning rate when so much of a run is done: up from little, then down along a cosine to little."""
    if done < warm_up:
        return max(done / warm_up, 0.02)
    return 0.02 + 0.98 * 0.5 * (1 + cos(pi * min(1.0, (done - warm_up) / (1 - warm_up))))


def right_in_a_row(agreement: Sequence[float]) -> float:
    """Drafts of a chain that are right before one is not, were the steps independent of each other."""
    total, product = 0.0, 1.0
    for each in agreement:
        product *= each
        total += product
    return total
