"""The training loop of a draft head: target outputs, unrolled steps, a learning-rate schedule, checkpoints.

Stops after some epochs or after a time budget; resumes from its last checkpoint, along the same schedule. Hands out the
head whenever its agreement with the target on held-out rows is the best so far. Called by the training pipeline and by
tests.
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
from roost.train.losses import EVALUATED_TEMPERATURE, NUM_MATCHED, Draw, LossWeights, drawn_tokens, step_loss
from roost.train.packing import PackedRows
from roost.train.target import TargetOutputs, run_target

SAVE_EVERY_S = 300.0
REPORT_EVERY = 20  # updates: reading the loss waits for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a head is trained."""

    num_steps: int = 7  # unrolled draft steps
    step_weight: float = 0.8  # the loss of step j is weighted with this to the power of j
    loss: str = "kl"  # one of LOSSES
    loss_weights: LossWeights = LossWeights()
    learning_rate: float = 5e-4  # at its peak
    warm_up: float = 0.03  # as a share of the run
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    batch_rows: int = 32
    micro_rows: int | None = None  # rows that are in memory at one time; None: the whole batch
    epochs: int = 10
    budget_s: float | None = None
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """How far training is."""

    update: int = 0
    num_updates: int = 0
    spent_s: float = 0.0
    compiling_s: float = 0.0  # of those, for the first update of each run
    loss: float = 0.0
    agreement: tuple[float, ...] = ()  # of each step, on the last batch that was reported
    held_out: tuple[float, ...] = ()  # of each step, on held-out rows, greedily
    held_out_drawn: tuple[float, ...] = ()  # of each step, both drawn at a temperature with the same noise
    best: tuple[float, ...] = ()  # held_out of the best head
    best_drawn: tuple[float, ...] = ()
    best_on: str = ""  # which rows those were

    def judge(self, held_out: "Agreement") -> None:
        """Note how a head does on held-out rows."""
        self.held_out, self.held_out_drawn = held_out.greedy, held_out.drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Share of positions where each step's token is the target's."""

    greedy: tuple[float, ...]
    drawn: tuple[float, ...]  # at EVALUATED_TEMPERATURE, with the same noise

    @property
    def score(self) -> float:
        """What heads are compared by: accepted drafts of a chain, greedily and drawn, in the mean."""
        return (right_in_a_row(self.greedy) + right_in_a_row(self.drawn)) / 2


Report = Callable[[TrainingState], None]
Evaluated = Callable[[TrainingState, dict[str, Tensor] | None], None]  # with the head, if it is the best so far


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
        self._fused_loss = fused(self._loss_and_counts, self._device)
        self.standing = TrainingState()
        self._random = torch.Generator().manual_seed(recipe.seed)
        self._own_id = torch.full((model.config.vocab_size,), -1, device=self._device)  # of a target's token
        self._own_id[vocabulary] = torch.arange(len(vocabulary), device=self._device)

    def train(
        self,
        rows: PackedRows,
        held_out: PackedRows,
        *,
        report: Report,
        evaluated: Evaluated,
        checkpoint: Path | None = None,
        is_enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run updates until the epochs or the budget are over or `is_enough`; evaluate after each epoch.

        Epochs and seconds of earlier runs count: an interrupted run resumes along the same schedule.
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
                    self._evaluate(held_out, evaluated)
                if checkpoint is not None and spent - saved > SAVE_EVERY_S:
                    self.save(checkpoint)
                    saved = spent
            self._evaluate(held_out, evaluated)
        finally:
            if checkpoint is not None:
                self.save(checkpoint)

    def evaluate_kept(self, state: Mapping[str, Tensor], held_out: PackedRows) -> None:
        """Evaluate a head that an earlier run kept, on the rows that are held out now, as the best so far."""
        if self.standing.best_on == held_out.key:
            return
        mine = {name: tensor.clone() for name, tensor in self.head.state().items()}
        self.head.load(state)
        kept = self.agreement(held_out)
        self.standing.best, self.standing.best_drawn, self.standing.best_on = kept.greedy, kept.drawn, held_out.key
        self.head.load(mine)

    @torch.no_grad()
    def agreement(self, rows: PackedRows) -> Agreement:
        """How often each step's token is the target's, over full batches of rows."""
        sums = torch.zeros(3, self._recipe.num_steps, device=self._device)
        for batch in rows.batches(min(self._part_rows, len(rows)), 0):
            sums += self._counts(batch)
        greedy, drawn = (sums[:2] / sums[2].clamp(min=1)).tolist()
        return Agreement(greedy=tuple(greedy), drawn=tuple(drawn))

    def save(self, path: Path) -> None:
        """Write a checkpoint to resume from: weights, optimizer state, and the training state."""
        tensors = {}
        for name, weight in self.head.named_parameters():
            tensors[f"weight/{name}"] = weight.detach()
            tensors |= {f"{kind}/{name}": tensor for kind, tensor in self._optimizer.state[weight].items()}
        part = path.with_name(path.name + ".part")
        whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, part, metadata={"standing": json.dumps(asdict(self.standing))})
        part.replace(path)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint."""
        with safe_open(path, "pt") as file:
            self.standing = TrainingState(**json.loads(file.metadata()["standing"]))
            self._random.manual_seed(self._recipe.seed + self.standing.update)  # other noise than at the beginning
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
        """How much of the training is done, in [0, 1], by its budget or its epochs; compile time does not count."""
        standing, budget_s = self.standing, self._recipe.budget_s
        by_count = standing.update / standing.num_updates
        if budget_s is None:
            return by_count
        spent, whole = (each - standing.compiling_s for each in (standing.spent_s, budget_s))
        return max(by_count, spent / max(whole, 1e-9))

    def _batches(self, rows: PackedRows, first: int) -> Iterator[PackedRows]:
        """Batches of all epochs, beginning with batch `first`."""
        recipe, number = self._recipe, 0
        for epoch in range(recipe.epochs):
            for batch in rows.batches(recipe.batch_rows, recipe.seed + epoch):
                if number >= first:
                    yield batch
                number += 1

    def _update(self, batch: PackedRows, share: float) -> None:
        recipe, standing = self._recipe, self.standing
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate * share
        self._optimizer.zero_grad(set_to_none=True)
        parts = list(batch.parts(self._part_rows))
        total = torch.zeros((), device=self._device)
        counts = torch.zeros(2, recipe.num_steps, device=self._device)
        for part in parts:
            loss, right, counted = self._run_batch(part)
            (loss / len(parts)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / len(parts)
            counts += torch.stack([right, counted])
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), recipe.clip)
        self._optimizer.step()
        standing.update += 1
        if standing.update % REPORT_EVERY == 1:
            standing.loss, standing.agreement = float(total), tuple((counts[0] / counts[1].clamp(min=1)).tolist())

    @property
    def _part_rows(self) -> int:
        """Rows that are in memory at one time."""
        return min(self._recipe.micro_rows or self._recipe.batch_rows, self._recipe.batch_rows)

    def _on_device(self, batch: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        columns = (batch.tokens, batch.owners, batch.is_said)
        tokens, owners, is_said = (torch.from_numpy(column).to(self._device) for column in columns)
        return tokens.to(torch.int64), owners, is_said

    def _run_batch(self, batch: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a batch; for each step, how many positions are right, and how many count."""
        tokens, owners, is_said = self._on_device(batch)
        target = run_target(self._model, tokens, owners, self._aux_layers, self._vocabulary)
        seed = torch.randint(2**31, (), generator=self._random).to(self._device, non_blocking=True)
        # made outside of what is compiled: there it would be arithmetic on 32-bit indices, too narrow for the noise
        return self._fused_loss(target, owners, is_said, _places(owners), seed)

    def _unroll(self, target: TargetOutputs) -> list[Tensor]:
        """The head's logits of every step."""
        device, num_steps = self._device, self._recipe.num_steps
        embedded = [shifted(target.embedded, 1 + step).to(torch.float32) for step in range(num_steps)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return self.head.unroll(embedded, target.features.to(torch.float32), target.seen)

    def _loss_and_counts(
        self, target: TargetOutputs, owners: Tensor, is_said: Tensor, places: Tensor, seed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        recipe = self._recipe
        num_top = min(NUM_MATCHED, len(self._vocabulary)) if recipe.loss == "match" else 1
        top = target.logits.topk(num_top, dim=-1).indices if num_top > 1 else target.logits.argmax(-1, keepdim=True)
        loss, rights, counted = torch.zeros((), device=self._device), [], []
        for number, logits in enumerate(self._unroll(target)):
            step = StepTargets.of(target, owners, is_said, self._own_id, number)
            draw = Draw(
                seed=seed,
                places=shifted(places, 1 + number),
                tokens=self._vocabulary,
                top=shifted(top, 1 + number),
            )
            of_step = step_loss(recipe.loss, logits, step.logits, step.counts, draw, recipe.loss_weights)
            loss = loss + recipe.step_weight**number * of_step
            best = self._vocabulary[logits.detach().argmax(dim=-1)]
            rights.append(((best == step.best) & step.is_said).sum())
            counted.append(step.is_said.sum())
        return loss, torch.stack(rights), torch.stack(counted)

    def _counts(self, batch: PackedRows) -> Tensor:
        """[3, num_steps]: positions that are right greedily, right when drawn, and all that count.

        The head's passes are not compiled: they run seldom, and compiling takes longer than it would save.
        """
        tokens, owners, is_said = self._on_device(batch)
        vocabulary, temperature, places = self._vocabulary, EVALUATED_TEMPERATURE, _places(owners)
        target = run_target(self._model, tokens, owners, self._aux_layers, vocabulary, temperature)
        assert target.drawn is not None
        found = []
        for number, logits in enumerate(self._unroll(target)):
            step = StepTargets.of(target, owners, is_said, self._own_id, number)
            drawn = fused(drawn_tokens, self._device)(logits, temperature, shifted(places, 1 + number), vocabulary)
            pairs = ((logits.argmax(dim=-1), step.best), (drawn, shifted(target.drawn, 1 + number)))
            rights = (vocabulary[mine] == theirs for mine, theirs in pairs)
            found.append(torch.stack([*((right & step.is_said).sum() for right in rights), step.is_said.sum()]))
        return torch.stack(found, dim=1)

    def _evaluate(self, held_out: PackedRows, evaluated: Evaluated) -> None:
        """Evaluate on held-out rows; hand out the head if it is the best so far."""
        standing = self.standing
        now, best = self.agreement(held_out), Agreement(greedy=standing.best, drawn=standing.best_drawn)
        before = (standing.best, standing.best_drawn, standing.best_on)
        standing.judge(now)
        is_best = standing.best_on != held_out.key or now.score > best.score
        if is_best:
            standing.best, standing.best_drawn, standing.best_on = now.greedy, now.drawn, held_out.key
        try:
            evaluated(standing, self.head.state() if is_best else None)
        except BaseException:  # then the head was not kept
            standing.best, standing.best_drawn, standing.best_on = before
            raise


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTargets:
    """The target's side of one unrolled step: position t of step j predicts the token at t + 2 + j."""

    logits: Tensor  # [num_rows, row_len, num_tokens] the target's, over the draft vocabulary
    best: Tensor  # [num_rows, row_len] the target's best token
    is_said: Tensor  # [num_rows, row_len] bool: that token is in the same answer, and generated by the target
    counts: Tensor  # [num_rows, row_len] 1.0 where it is also in the draft vocabulary, else 0.0

    @classmethod
    def of(cls, target: TargetOutputs, owners: Tensor, is_said: Tensor, own_id: Tensor, step: int) -> "StepTargets":
        """The target's outputs, shifted to a step's positions."""
        number, row_len = 1 + step, owners.shape[1]
        place = torch.arange(row_len, device=owners.device)
        same = (shifted(owners, number + 1) == owners) & (owners >= 0) & (place + number + 1 < row_len)
        said = same & shifted(is_said, number + 1)
        best = shifted(target.best, number)
        counts = said & (own_id[best] >= 0)
        return cls(logits=shifted(target.logits, number), best=best, is_said=said, counts=counts.to(torch.float32))


def _places(owners: Tensor) -> Tensor:
    """A number for each position of a batch."""
    return torch.arange(owners.numel(), device=owners.device).view(owners.shape)


def shifted(values: Tensor, number: int) -> Tensor:
    """Each row shifted left by `number` positions; the values at its end are meaningless."""
    return values.roll(-number, dims=1)


def schedule(done: float, warm_up: float) -> float:
    """Factor of the learning rate when `done` of a run is over: linear warm-up, then cosine decay to 0.02."""
    if done < warm_up:
        return max(done / warm_up, 0.02)
    return 0.02 + 0.98 * 0.5 * (1 + cos(pi * min(1.0, (done - warm_up) / (1 - warm_up))))


def right_in_a_row(agreement: Sequence[float]) -> float:
    """Expected number of accepted drafts of a chain, if the steps were independent of each other."""
    total, product = 0.0, 1.0
    for each in agreement:
        product *= each
        total += product
    return total
