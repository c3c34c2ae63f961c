"""EAGLE drafter: a head that goes on from the target's hidden states, in chains and dynamic trees.

Owns the head's KV, in slots of the full book, and what passes from step to step on the device: the head's last hidden
state of each row. A round's first drafts follow from that; each further draft step is one pass of K branches, which lie
in the row as `SpecShape.branch_position` says. Never decides what is kept. Called by the forward
passes.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, PageTable
from roost.attention.protocol import Attention, attend_through
from roost.drafters.make import Parts
from roost.drafters.protocol import Pairs
from roost.drafters.tree import Candidates, Trees, best_trees, chains
from roost.errors import InvariantError
from roost.layers.attention import Attend
from roost.layers.gumbel import RowDraws
from roost.layers.ops import Ops
from roost.layers.segments import HostSegments, Segments
from roost.models.model import PairHead
from roost.spec_shape import SpecShape
from roost.step import RowSetup


def make(parts: Parts) -> "EagleDrafter":
    """The drafter of an engine."""
    if not isinstance(parts.head, PairHead):
        raise InvariantError(f"the head that drafts must be an EAGLE head, got {type(parts.head)}")
    kv_cache = KvCache(parts.table, [kv.kept_as(parts.resolved.memory.kv_cache_dtype) for kv in parts.head.kv])
    return EagleDrafter(
        parts.head, parts.resolved.spec, kv_cache, parts.attention, parts.ops, parts.draws, is_host=parts.is_host
    )


class EagleDrafter:
    """A head, its KV, and where each row stands."""

    def __init__(
        self,
        head: PairHead,
        shape: SpecShape,
        kv_cache: KvCache,
        attention: Attention,
        ops: Ops,
        draws: RowDraws,
        *,
        is_host: bool = False,
    ) -> None:
        table = kv_cache.table
        self._draws, self._is_host = draws, is_host
        self._head, self._shape, self._table, self._attention, self._ops = head, shape, table, attention, ops
        self._extend_pass, self._draft_pass, self._best_pass = ops.new_pass(), ops.new_pass(), ops.new_pass()
        self.kv_cache = kv_cache
        self._layers = [(0, layer) for layer in range(len(head.kv))]  # of the one KV cache
        num_rows, device = len(table.pages), table.pages.device
        self._token_ids = head.token_ids(torch.arange(head.num_tokens, device=device))  # the target's, of its own
        self._hidden = torch.zeros((num_rows, head.hidden_size), dtype=head.dtype, device=device)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the target that the head looks at."""
        return self._head.aux_layers

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Nothing: what a row needs comes with its prefill."""

    def extend(self, pairs: Pairs) -> None:
        """Run the head over what a step wrote; keep where each row stands."""
        hidden, aux_hidden, at = pairs.hidden, pairs.aux_hidden, pairs.sources
        if at is not None:
            hidden, aux_hidden = hidden[at], tuple(each[at] for each in aux_hidden)

        def forward(inputs: Sequence[Tensor]) -> tuple[Tensor]:
            tokens, positions, slots, hidden, *aux_hidden = inputs
            attend = self._attend(slots, pairs.segments)
            return (self._head.forward(tokens, self._head.fuse(hidden, tuple(aux_hidden)), positions, attend),)

        inputs = (pairs.tokens, pairs.positions, pairs.slots, hidden, *aux_hidden)
        (output,) = self._extend_pass.run(pairs.segments.kind, forward, inputs, pairs.segments)
        if len(pairs.sampling_rows):
            self._hidden.index_copy_(0, pairs.sampling_rows, output.index_select(0, pairs.last_pairs))

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """Draft, in no more passes than the trees can be deep."""
        if self._shape.topk == 1:
            return self._chains(rounds, roots, width, forced)
        return self._beams(DraftBranches(rounds, self._shape, self._table), roots, width)

    def _chains(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """The best token, then the best after it; a chain goes on in its row. What is forced need not be guessed."""
        rows, num_passes, is_plain = rounds.rows, self._num_steps(width) - 1, self._is_plain(rounds.rows)
        hidden = self._hidden.index_select(0, rows)
        (found,) = self._best_pass.run(
            is_plain, lambda inputs: (self._found(*inputs, is_plain=is_plain),), (hidden,), None
        )
        tokens = self._drafted(found, rows, rounds.start_positions - 1, is_plain=is_plain).clone()
        if forced is not None:
            tokens = _unless(forced[:, 0], tokens)
            num_passes = int((forced < 0).any(dim=0).sum()) and num_passes  # none, where nothing is left to guess
        places = self._ops.chain_places(rows, rounds.start_positions, num_passes, self._table.of_rounds)
        drafts = [roots, tokens]
        for step, (positions, slots) in enumerate(zip(places.positions.unbind(), places.slots.unbind(), strict=True)):
            later = rounds.later(step, positions)
            hidden, found = self._draft(tokens, hidden, positions, slots, later, is_plain=is_plain)
            best = self._drafted(found, rows, positions, is_plain=is_plain)
            # in any case a copy: the next pass may write there
            tokens = best.clone() if forced is None else _unless(forced[:, step + 1], best)
            drafts.append(tokens)
        if len(drafts) < width:
            assert forced is not None
            return chains(torch.cat([roots[:, None], forced], dim=1))
        return chains(torch.stack(drafts, dim=1))

    def _beams(self, branches: "DraftBranches", roots: Tensor, width: int) -> Trees:
        """A beam of K paths, one token longer with each pass; every token they met is a candidate."""
        topk, rows, num_steps = self._shape.topk, branches.rounds.rows, self._num_steps(width)
        hidden = self._hidden[rows]
        tokens, scores = self._best(hidden, rows, branches.rounds.start_positions - 1)  # [R, K]
        hidden = hidden[:, None].expand(-1, topk, -1)  # [R, K, hidden_size]
        beam = torch.arange(topk, device=rows.device).expand_as(tokens)  # candidate numbers of the paths' ends
        met = [(tokens, scores, torch.full_like(tokens, -1))]
        for step in range(num_steps - 1):
            hidden = self._pass(tokens, hidden, branches, step)
            positions = (branches.rounds.start_positions + step)[:, None].expand_as(tokens)
            own = rows[:, None].expand_as(tokens)
            next_tokens, next_scores = self._best(hidden, own, positions)  # [R, K, K]: the best after each path
            next_scores = next_scores + scores[:, :, None]
            parents = beam[:, :, None].expand_as(next_tokens)
            num_met = topk + step * topk**2
            met.append((next_tokens.flatten(1), next_scores.flatten(1), parents.flatten(1)))
            scores, picked = (each[:, :topk] for each in next_scores.flatten(1).sort(descending=True, stable=True))
            tokens, beam = next_tokens.flatten(1).gather(1, picked), num_met + picked
            if step < num_steps - 2:  # a path goes on from its parent, wherever that was
                branch = picked // topk
                hidden = hidden.gather(1, branch[:, :, None].expand_as(hidden))
                self._attention.copy(self.kv_cache, *branches.moves(branch, step + 1))
        all_tokens, all_scores, all_parents = (torch.cat(column, dim=1) for column in zip(*met, strict=True))
        candidates = Candidates(tokens=all_tokens, scores=all_scores, parents=all_parents)
        return best_trees(roots, candidates, width)

    def _num_steps(self, width: int) -> int:
        """Draft steps of a round that verifies `width` nodes: as deep as its tree can be."""
        return self._shape.head_steps_of(width)

    def _pass(self, tokens: Tensor, hidden: Tensor, branches: "DraftBranches", step: int) -> Tensor:
        """One draft step: tokens [R, K] after hidden states [R, K, hidden_size] give the next hidden states."""
        positions = (branches.rounds.start_positions + step)[:, None].expand_as(tokens)
        places = positions.flatten(), branches.slots(step).flatten()
        segments = branches.segments(step)
        drafted, *_ = self._draft(tokens.flatten(), hidden.flatten(0, 1), *places, segments, is_plain=True)
        return drafted.view_as(hidden)

    def _draft(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, segments: Segments, *, is_plain: bool
    ) -> tuple[Tensor, ...]:
        """Hidden states of one token in each segment; of chains, what the draft after each is found from as well."""

        def forward(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            tokens, hidden, positions, slots = inputs
            output = self._head.forward(tokens, hidden, positions, self._attend(slots, segments))
            return (output, self._found(output, is_plain=is_plain)) if self._shape.topk == 1 else (output,)

        kind = segments.kind, is_plain
        return self._draft_pass.run(kind, forward, (tokens, hidden, positions, slots), segments)

    def _best(self, hidden: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The K best tokens after hidden states [..., hidden_size] of pairs, and their scores, best first.

        With the noise of a draw these are the K tokens that the target most likely draws (Gumbel top-k), and a score is
        how likely, as a log-probability: the noise is known, what the target thinks is not.
        """
        logits, shape = self._head.logits(hidden.reshape(-1, hidden.shape[-1])), (*hidden.shape[:-1], self._shape.topk)
        if not self._is_plain(rows):
            # of one row they are spread without memory of their own
            at = rows.flatten().contiguous(), positions.flatten() + 2
            logits = self._ops.draft_scores(logits, self._token_ids, *at, self._draws)
        scores, ids = logits.to(torch.float32).log_softmax(dim=-1).topk(self._shape.topk, dim=-1)
        return self._token_ids[ids].view(shape), scores.view(shape)

    def _is_plain(self, rows: Tensor) -> bool:
        """Whether the head's best tokens are the drafts of these rows; where nobody can look, they may not be."""
        if not self._is_host:
            return False
        at = rows.flatten()
        return not (self._draws.reals[0][at].any() or self._draws.wholes[2][at].any())

    def _found(self, hidden: Tensor, *, is_plain: bool) -> Tensor:
        """What the drafts [R] after hidden states [R, hidden_size] are found from: logits, or they themselves."""
        logits = self._head.logits(hidden)
        return self._head.token_ids(self._ops.argmax(logits)) if is_plain else logits

    def _drafted(self, found: Tensor, rows: Tensor, positions: Tensor, *, is_plain: bool) -> Tensor:
        """The drafts [R] after pairs at `positions`, drawn as the target will draw there."""
        if is_plain:
            return found
        best = self._ops.best_drafts(found, self._token_ids, rows, positions + 2, self._draws)
        return self._token_ids.index_select(0, best)

    def _attend(self, slots: Tensor, segments: Segments) -> Attend:
        return attend_through(self._attention, [self.kv_cache], [slots], segments, self._layers)


class DraftBranches:
    """Where the branches of some rounds lie: `SpecShape.branch_position` of every row at once, on the device."""

    def __init__(self, rounds: Segments, shape: SpecShape, table: PageTable) -> None:
        self.rounds, self._shape = rounds, shape
        self._rows, self._base, self._table = rounds.rows[:, None], rounds.start_positions[:, None], table
        self._shifts = torch.arange(shape.topk, device=rounds.rows.device) * shape.branch_len  # [K]

    def segments(self, step: int) -> Segments:
        """The token that each branch runs at a step: K segments of each round, one after the other."""
        return self._first_step.later(step, self._first_step.start_positions + step)

    def slots(self, step: int) -> Tensor:
        """Slots [R, K] that the branches write at a step."""
        return self._table.slots(self._rows, self._base + self._shifts + step)

    def moves(self, branch: Tensor, num_steps: int) -> tuple[Tensor, Tensor]:
        """(from, to) slots [R, n] by which branch k goes on from what branch `branch[k]` wrote in its first steps."""
        steps = torch.arange(num_steps, device=self._rows.device)
        rows, starts = self._rows[:, :, None], self._base[:, :, None] + steps  # [R, 1, num_steps]
        sources = self._table.slots(rows, starts + self._shifts[branch][:, :, None])
        dests = self._table.slots(rows, starts + self._shifts[:, None])
        return sources.flatten(1), dests.flatten(1)

    @cached_property
    def _first_step(self) -> Segments:
        """The first step's segments: a branch's prefix is the row's text, and the rest lies in slots of its own."""
        topk, device = self._shape.topk, self._rows.device
        index = torch.arange(len(self._rows) * topk, dtype=torch.int32, device=device)
        return Segments(
            rows=_each(self._rows, topk),
            start_positions=_each(self._base, topk),
            offsets=index,
            query_lens=torch.ones_like(index),
            tile_segments=index,
            tile_offsets=torch.zeros_like(index),
            tile_len=1,
            branch_bases=_each(self._base, topk),
            branch_shifts=self._shifts.repeat(len(self._rows)),
            host=None if self.rounds.host is None else self._branched_host(self.rounds.host),
        )

    def _branched_host(self, rounds: HostSegments) -> HostSegments:
        """The same on the host."""
        topk = self._shape.topk
        columns = (rounds.rows, rounds.start_positions, rounds.query_lens, rounds.is_round, rounds.tree_of)
        rows, start_positions, query_lens, is_round, tree_of = (np.repeat(column, topk) for column in columns)
        return HostSegments(
            rows=rows,
            start_positions=start_positions,
            query_lens=query_lens,
            is_round=is_round,
            tree_of=tree_of,
            branch_bases=start_positions,
            branch_shifts=np.tile(np.arange(topk) * self._shape.branch_len, len(rounds.rows)),
            num_branches=topk,
        )


def _unless(forced: Tensor, guessed: Tensor) -> Tensor:
    """Tokens that are forced, and guesses where none is."""
    return torch.where(forced < 0, guessed, forced)


def _each(column: Tensor, number: int) -> Tensor:
    """Every value of a column [R, 1] so many times, one after the other."""
    return column.expand(-1, number).flatten().contiguous()  # of one value, it would have no stride
