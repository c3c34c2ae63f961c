"""Plans made by hand, and a model whose next token is known: what units of the device side run on.

Row r has the pages r * PAGES + 1, r * PAGES + 2, … of the only book. The model adds its tokens' successors, modulo the
vocabulary, and keeps KV of one layer like any other. Used by the units of forward passes and of the runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.layers.attention import Attend
from roost.layers.ops import TORCH_OPS, Ops
from roost.models.model import KvShape, traits_of
from roost.sampling.params import SamplingParams
from roost.spec_shape import SpecShape
from roost.step import SAMPLED, Ints, RowId, RowSetup, StepId, StepPlan, TableDelta

VOCAB = 11
PAGE_SIZE = 4
PAGES = 8  # of each row
ROUND = -1  # as a start position: the device knows the row's length


def ints(*values: int) -> Ints:
    """A column."""
    return np.array(values, dtype=np.int32)


class SuccessorModel:
    """After token t comes t + 1. Its one layer keeps each token in its keys and values."""

    ops: Ops = TORCH_OPS
    dtype = torch.float32
    hidden_size = VOCAB
    activation_width = VOCAB
    num_layers = 1
    kv = (KvShape(num_kv_heads=1, head_dim=2, scale=1.0, dtype=torch.float32),)

    def __init__(self) -> None:
        self.breaks = False  # the next pass raises

    @property
    def traits(self) -> ModelTraits:
        """One full layer."""
        return traits_of(self.kv, vocab_size=VOCAB, context_max=PAGES * PAGE_SIZE)

    def embed(self, tokens: Tensor) -> Tensor:
        """One-hot."""
        return torch.nn.functional.one_hot(tokens.clamp(min=0), VOCAB).to(self.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The tokens themselves; what attention says is not looked at."""
        if self.breaks:
            raise RuntimeError("as the test wants it")
        value = tokens[:, None, None].expand(-1, 1, 2).to(self.dtype)
        cos_sin = torch.ones(len(tokens), 1, 2), torch.zeros(len(tokens), 1, 1)
        attend(0, torch.cat([value, value], dim=1), value, cos_sin)
        return self.embed(tokens)

    def forward_with_aux(
        self, tokens: Tensor, positions: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same at each layer."""
        hidden = self.forward(tokens, positions, attend)
        return hidden, (hidden,) * len(aux_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """The successor has the largest."""
        return hidden.roll(1, dims=1)


def small(spec: SpecConfig | None = None) -> Resolved:
    """A configuration for that model."""
    memory = MemoryConfig(page_size=PAGE_SIZE, pool_tokens=8 * PAGES * PAGE_SIZE)
    sched = SchedConfig(context=PAGES * PAGE_SIZE - 8, max_running=4, chunk=16)
    config = EngineConfig(memory=memory, sched=sched, spec=spec or SpecConfig())
    return resolve(config, SuccessorModel().traits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a plan: a chunk of tokens from a start position on, or a round of some width."""

    row: int
    tokens: tuple[int, ...] = ()
    start: int = ROUND
    is_final: bool = True  # of a chunk
    width: int = 1  # of a round
    device_len_max: int = 0  # of a round
    begins: bool = False
    history: tuple[int, ...] = ()


def plan_of(rows: Sequence[Row], shape: SpecShape, step: int = 0, held: int = PAGES) -> StepPlan:
    """A plan; each row holds so many pages, and the table entries of a row that begins are in it."""
    chunks = [bool(row.tokens) for row in rows]
    pages = [[row.row * PAGES + 1 + index for index in range(PAGES)] for row in rows if row.begins]
    begins = [row for row in rows if row.begins]
    none = ints(*[-1] * len(rows))
    return StepPlan(
        step=StepId(step),
        shape=shape,
        rows=ints(*(row.row for row in rows)),
        epochs=np.zeros(len(rows), dtype=np.int32),
        is_prefill=np.array(chunks),
        query_lens=ints(*(len(row.tokens) or row.width for row in rows)),
        start_positions=ints(*(row.start for row in rows)),
        device_lens_max=ints(*(row.start if row.tokens else row.device_len_max for row in rows)),
        firsts=np.zeros((1, len(rows)), dtype=np.int32),
        ends=np.full((1, len(rows)), held * PAGE_SIZE, dtype=np.int32),
        is_final=np.array([bool(row.tokens) and row.is_final for row in rows]),
        next_tokens=ints(*(SAMPLED if not row.tokens or row.is_final else 0 for row in rows)),
        tokens=ints(*(token for row in rows for token in row.tokens)),
        token_offsets=np.cumsum([0, *(len(row.tokens) for row in rows)]).astype(np.int32),
        num_top_logprobs=none,
        prompt_logprob_starts=none,
        prompt_logprob_ends=none,
        setups=tuple(
            RowSetup(
                row=RowId(row.row),
                sampling=SamplingParams(temperature=0),
                prompt_len=len(row.tokens),
                min_len=len(row.tokens),
                stop_ids=(),
                tokens=ints(*(row.history or row.tokens)),
            )
            for row in begins
        ),
        deltas=(
            TableDelta(
                rows=ints(*(row.row for row in begins)),
                firsts=ints(*[0] * len(begins)),
                offsets=ints(*(PAGES * number for number in range(len(begins) + 1))),
                pages=ints(*(page for own in pages for page in own)),
            ),
        ),
    )
