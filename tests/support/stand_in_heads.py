"""Stand-ins for draft heads: the target itself, sure or now and then wrong, and a watcher of what a head is asked.

Used by the tests of drafting, where a wrong draft must show although no output ever does.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.heads import TargetHead
from roost.layers.attention import Attend
from roost.models.model import KvShape, PairHead
from tests.support.tiny_models import SHAPE, Tiny, tiny

NULL = 0  # a first token that nobody looks at


class HalfHead(TargetHead):
    """The target as its own drafter, that at every third token takes its second choice for the best.

    Not sure of itself: in a tree the right path is then another than the first, and has to be moved.
    """

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's, with the two best changed about."""
        logits = self.model.logits(hidden) * 3
        values, ids = logits.topk(2, dim=-1)
        is_wrong = ids[:, :1] % 3 == 0
        return logits.scatter(1, ids, torch.where(is_wrong, values.flip(1), values))


@cache
def checkpoint(kind: str) -> Tiny:
    """A checkpoint by name, the forgetful one too."""
    return forgetful() if kind == "forgetful" else tiny(kind)


def forgetful() -> Tiny:
    """A checkpoint that pays no attention to the token NULL, so that a drafter which never sees it misses nothing.

    One dimension of the hidden state is NULL's alone: nothing else reads or writes it but the keys, which it makes so
    unlike every query that their weight is zero.
    """
    torch.manual_seed(11)
    rope = {"rope_type": "default", "rope_theta": 1e8}  # the last pair of dimensions hardly turns
    reference = LlamaForCausalLM(LlamaConfig(**{**SHAPE, "attention_bias": True, "rope_parameters": rope}))
    own, head_dim = SHAPE["hidden_size"] - 1, SHAPE["head_dim"]
    state = reference.state_dict()
    for name, weight in state.items():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias")):
            weight[own] = 0
        elif name.endswith("proj.weight"):
            weight[:, own] = 0
    state["model.embed_tokens.weight"][:, own] = 0
    state["model.embed_tokens.weight"][NULL, own] = 50.0
    state["lm_head.weight"][NULL] = 0  # and it is never the best
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.self_attn."
        state[prefix + "q_proj.bias"].view(-1, head_dim)[:, -1] = 40.0
        state[prefix + "k_proj.weight"].view(-1, head_dim, SHAPE["hidden_size"])[:, -1, own] = -40.0
    return Tiny(reference=reference.eval())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """One pass of a head."""

    tokens: Tensor
    hidden: Tensor
    positions: Tensor
    output: Tensor


@dataclass(slots=True, eq=False)
class Watched:
    """A head that writes down its passes."""

    head: PairHead
    passes: list[Asked] = field(default_factory=list)

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The head's."""
        return self.head.kv

    @property
    def dtype(self) -> torch.dtype:
        """The head's."""
        return self.head.dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The head's."""
        return self.head.aux_layers

    @property
    def hidden_size(self) -> int:
        """The head's."""
        return self.head.hidden_size

    @property
    def num_tokens(self) -> int:
        """The head's."""
        return self.head.num_tokens

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """The head's."""
        return self.head.fuse(last, aux_hidden)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The head's, written down."""
        output = self.head.forward(tokens, hidden, positions, attend)
        self.passes.append(Asked(tokens=tokens, hidden=hidden, positions=positions, output=output))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's."""
        return self.head.logits(hidden)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The head's."""
        return self.head.token_ids(draft_ids)
