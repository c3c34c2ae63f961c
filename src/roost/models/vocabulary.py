"""The two ends of a model where tokens are numbers: the embedding looks rows up, the LM head makes logits.

Of ranks that share a model each has the rows of a part of the tokens. One that does not have a token's row looks up
zeros, so that the sum over the ranks is the row itself; logits are put side by side. Nothing depends on which tokens
there are, so that a graph can be captured. Called by the decoder and by draft heads.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import pad

from roost.layers.linear import Linear, RowTable
from roost.layers.ops import Ops
from roost.layers.quantised import QuantisedWeight
from roost.models.parts import Cut, split

LookUp = Callable[[Tensor], Tensor]  # from tokens to their rows


def rows_of(embedding: Tensor | QuantisedWeight, head: Linear | None, num_tokens: int, ops: Ops) -> LookUp:
    """From any of `num_tokens` tokens to the rows of an embedding, of which this rank has its part.

    `head` is the projection by that part, where there is one.
    """
    look_up, own = _own_rows(embedding, head, ops), split(num_tokens, ops.group.rank, ops.group.size)
    if not isinstance(own, Cut):
        return look_up
    ((first, end),) = own.runs

    def look_up_everywhere(tokens: Tensor) -> Tensor:
        found = look_up(tokens.clamp(first, end - 1) - first)
        return ops.group.all_reduce(found.masked_fill(((tokens < first) | (tokens >= end))[..., None], 0.0))

    return look_up_everywhere


def whole_logits(project: Linear, num_tokens: int, ops: Ops) -> Linear:
    """The logits of `num_tokens` tokens from a rank's projection to those of its part."""
    own, longest = (split(num_tokens, rank, ops.group.size) for rank in (ops.group.rank, 0))
    if not isinstance(own, Cut) or not isinstance(longest, Cut):
        return project
    missing = longest.length - own.length

    def logits(hidden: Tensor) -> Tensor:
        found = ops.linear(hidden, project)
        whole = ops.group.all_gather(pad(found, (0, missing)) if missing else found)
        return whole[..., :num_tokens].contiguous()

    return logits


def _own_rows(embedding: Tensor | QuantisedWeight, head: Linear | None, ops: Ops) -> LookUp:
    if isinstance(embedding, Tensor):
        return partial(ops.look_up, embedding)
    table = embedding.linear(None) if head is None else head
    assert isinstance(table, RowTable), table
    return table.rows
