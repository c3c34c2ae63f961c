"""gpt-oss: window layers and full ones in turn, attention sinks, YaRN, and a mixture of experts in every layer.

All projections have biases, the router and the experts too; an expert's gate and up are clamped. Published checkpoints
keep experts in MXFP4, which `weights.mxfp4` reads as the floats that they stand for; others have these floats. Reads a
config.json into a `DecoderConfig`. Called by the registry.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from roost.layers.ops import CLAMP_ALPHA, CLAMP_LIMIT, CLAMPED
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, FeedForward, LayerKind, Loader, feed_forward_of_normed
from roost.models.expert_weights import load_woven_experts
from roost.models.experts import ExpertsFeed
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import FULL, SLIDING, layer_types, plain_decoder, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasedExperts:
    """Makes the feed-forward of a layer from its tensors."""

    sizes: ExpertsFeed

    def __call__(self, loader: Loader, prefix: str) -> FeedForward:
        """That of the layer with this prefix."""
        sizes, ops, router_name = self.sizes, loader.ops, f"{prefix}mlp.router"
        router = loader.floats((f"{router_name}.weight",), sizes.num_experts, f"{router_name}.bias")
        experts = load_woven_experts(loader, f"{prefix}mlp.experts", sizes.num_experts, sizes.width, CLAMPED)

        def said_of(normed: Tensor) -> Tensor:
            # the softmax over the chosen ones is that over all, divided by what the chosen ones have of it
            routed = ops.best_experts(router(normed), sizes.num_active, True)
            return ops.group.all_reduce(ops.mix_experts(normed, routed, experts))

        return feed_forward_of_normed(loader, said_of)


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder of a GptOssForCausalLM."""
    fields.refuse_unless("hidden_act", "silu")  # of which the clamped gate is a kind
    fields.refuse_unless("swiglu_alpha", CLAMP_ALPHA)
    fields.refuse_unless("swiglu_limit", CLAMP_LIMIT)
    sizes = ExpertsFeed(
        num_experts=fields.integer("num_local_experts"),
        num_active=fields.integer("num_experts_per_tok"),
        width=fields.integer("intermediate_size"),
        is_normed=True,
    )
    feed = BiasedExperts(sizes=sizes)
    layers = tuple(replace(kind, feed_forward=feed) for kind in _layers(fields))
    plain = plain_decoder(fields, layers, activation="silu", reads=("num_local_experts",))
    biased = fields.flag("attention_bias", True)
    return replace(plain, qkv_bias=biased, out_bias=biased, sinks=True, feeds=sizes.feeds)


def _layers(fields: Fields) -> tuple[LayerKind, ...]:
    number, rope = fields.integer("num_hidden_layers"), read_rope(fields, theta=150000.0)
    types = layer_types(fields, tuple(FULL if layer % 2 else SLIDING for layer in range(number)))
    window = fields.integer("sliding_window") if SLIDING in types else None
    return tuple(LayerKind(rope=rope, window=window if kind == SLIDING else None) for kind in types)


FAMILY = Family(architectures=("GptOssForCausalLM",), draft_hooks=True, read_config=read_config, load=Decoder)
