"""A mixture of experts as a feed-forward: its sizes as a config says them, and how a layer's experts are loaded.

Published checkpoints have a tensor for each expert's matrix; what transformers holds in memory has all of a layer in
one. Both are read. A router stays in floats, whatever form the weights have: what it rounds differently goes elsewhere.
Named by the families that have experts.
"""

from dataclasses import dataclass

from torch import Tensor

from roost.errors import ConfigError
from roost.layers.experts import best_experts
from roost.models.decoder_layers import FeedForward, Loader, feed_forward_of_normed
from roost.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFeed:
    """Makes the feed-forward of a layer from its tensors."""

    num_experts: int
    num_active: int  # that a token goes through
    width: int  # of each
    is_normed: bool  # whether the shares of a token's experts sum up to one

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise ConfigError(
                f"the model's tokens go through {self.num_active} of {self.num_experts} experts, which cannot be"
            )

    def __call__(self, loader: Loader, prefix: str) -> FeedForward:
        """That of the layer with this prefix."""
        router = loader.router(f"{prefix}mlp.gate.weight", self.num_experts)
        experts, mix = loader.experts(f"{prefix}mlp.experts", self.num_experts, self.width), loader.ops.mix_experts

        def said_of(normed: Tensor) -> Tensor:
            return mix(normed, best_experts(router(normed), self.num_active, is_normed=self.is_normed), experts)

        return feed_forward_of_normed(loader, said_of)


def read_experts(fields: Fields) -> ExpertsFeed:
    """The experts of a config in Qwen's words."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    return ExpertsFeed(
        num_experts=fields.integer(name),
        num_active=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        is_normed=fields.flag("norm_topk_prob", False),
    )
