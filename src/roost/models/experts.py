"""A mixture of experts as a feed-forward: its sizes as a config says them, and how a layer's experts are loaded.

Published checkpoints have a tensor for each expert's matrix; what transformers holds in memory has all of a layer in
one. Both are read. A router stays in floats, whatever form the weights have: what it rounds differently goes elsewhere.
Named by the families that have experts.
"""

from dataclasses import dataclass

from torch import Tensor

from roost.errors import ConfigError
from roost.layers.linear import Linear
from roost.models.decoder_layers import Feed, FeedForward, Loader, feed_forward_of_normed
from roost.models.expert_weights import load_experts
from roost.models.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsFeed:
    """Makes the feed-forward of a layer from its tensors."""

    num_experts: int
    num_active: int  # that a token goes through
    width: int  # of each
    is_normed: bool  # whether the shares of a token's experts sum up to one
    shared_width: int | None = None  # of an expert that every token goes through, by a gate; None: there is none

    def __post_init__(self) -> None:
        if not 1 <= self.num_active <= self.num_experts:
            raise ConfigError(
                f"the model's tokens go through {self.num_active} of {self.num_experts} experts, which cannot be"
            )

    @property
    def feeds(self) -> tuple[Feed, ...]:
        """A token's experts side by side, and the one for all."""
        shared = () if self.shared_width is None else (Feed(width=self.shared_width),)
        return (Feed(width=self.width, active=self.num_active), *shared)

    def __call__(self, loader: Loader, prefix: str) -> FeedForward:
        """That of the layer with this prefix."""
        router = loader.floats((f"{prefix}mlp.gate.weight",), self.num_experts)
        experts, ops = load_experts(loader, f"{prefix}mlp.experts", self.num_experts, self.width), loader.ops

        def said_of(normed: Tensor) -> Tensor:
            routed = ops.best_experts(router(normed), self.num_active, self.is_normed)
            return ops.mix_experts(normed, routed, experts)

        sum_of = ops.group.all_reduce
        if self.shared_width is None:
            return feed_forward_of_normed(loader, lambda normed: sum_of(said_of(normed)))
        shared, gate = self._shared(loader, prefix), loader.floats((f"{prefix}mlp.shared_expert_gate.weight",), 1)
        return feed_forward_of_normed(
            loader, lambda normed: sum_of(said_of(normed) + gate(normed).sigmoid() * shared(normed))
        )

    def _shared(self, loader: Loader, prefix: str) -> Linear:
        """The expert that every token goes through: this rank's share of what it says."""
        assert self.shared_width is not None
        config, ops, width = loader.config, loader.ops, loader.split(self.shared_width)
        names = tuple(f"{prefix}mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down"))
        project_in = loader.linear(names[:2], (width, width), config.hidden_size, bias=False)
        project_out = loader.linear(names[2:], (config.hidden_size,), width, bias=False)
        return lambda normed: ops.linear(ops.gate_up(ops.linear(normed, project_in), config.activation), project_out)


def read_experts(fields: Fields) -> ExpertsFeed:
    """The experts of a config in Qwen's words."""
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    return ExpertsFeed(
        num_experts=fields.integer(name),
        num_active=fields.integer("num_experts_per_tok"),
        width=fields.integer("moe_intermediate_size"),
        is_normed=fields.flag("norm_topk_prob", False),
    )
