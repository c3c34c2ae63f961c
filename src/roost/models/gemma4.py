"""Gemma 4, text: window layers, and full ones with heads of their own; late layers read the KV of earlier ones.

Besides what Gemma 3 has: values are normed and may be the keys, tokens tell each layer something by itself, layers are
scaled, logits are capped; experts may stand beside the feed-forward. Published checkpoints read images and sound, too:
of these the text part is taken. Reads a config.json into a `DecoderConfig`. Called by the registry.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from roost.layers.experts import Routed
from roost.layers.ops import Residual
from roost.layers.rotary import Rope
from roost.models.decoder import Decoder
from roost.models.decoder_layers import (
    DecoderConfig,
    Feed,
    FeedForward,
    FeedNorms,
    Heads,
    LayerKind,
    Loader,
    gated_feed_forward,
)
from roost.models.expert_weights import load_experts
from roost.models.experts import ExpertsFeed
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import FULL, SLIDING, layer_types, plain_decoder, rope_of
from roost.models.tensor_names import NormNames, TensorNames

_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_feed="pre_feedforward_layernorm",
    after_feed="post_feedforward_layernorm",
)
_UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")  # in layers that read the KV of others some checkpoints have them
_NOT_TEXT = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
_READS = ("final_logit_softcapping", "use_bidirectional_attention", "num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class WideFeed:
    """Makes a feed-forward of another width than the config's."""

    width: int

    def __call__(self, loader: Loader, prefix: str) -> FeedForward:
        """That of the layer with this prefix."""
        return gated_feed_forward(loader, prefix, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideExperts:
    """Makes a feed-forward with experts beside it: both read the stream, and what they say is normed and summed."""

    width: int
    experts: ExpertsFeed

    def __call__(self, loader: Loader, prefix: str) -> FeedForward:
        """That of the layer with this prefix."""
        sizes, ops, eps = self.experts, loader.ops, loader.config.norm_eps
        dense = gated_feed_forward(loader, prefix, self.width)
        experts = load_experts(loader, f"{prefix}experts", sizes.num_experts, sizes.width)
        router = loader.floats((f"{prefix}router.proj.weight",), sizes.num_experts)
        router_norm = loader.norm(f"{prefix}router.scale") * loader.config.hidden_size**-0.5
        factors = loader.norm(f"{prefix}router.per_expert_scale", sizes.num_experts)
        before, after_dense, after = (
            loader.norm(f"{prefix}{name}.weight")
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
        )

        def routed(hidden: Tensor) -> Routed:
            found = ops.best_experts(router(ops.norm(hidden, router_norm, eps)), sizes.num_active, True)
            return replace(found, shares=(found.shares * factors[found.ids]).to(hidden.dtype))

        def feed_forward(stream: Residual, norms: FeedNorms) -> Residual:
            said = dense(stream, replace(norms, after=after_dense, next=None))
            hidden, of_dense = said.hidden, said.added
            mixed = ops.group.all_reduce(ops.mix_experts(ops.norm(hidden, before, eps), routed(hidden), experts))
            of_experts = ops.norm(mixed, after, eps)
            assert of_dense is not None and norms.after is not None
            both = ops.scaled_sum(Residual(of_dense, of_experts), 1.0)
            return Residual(hidden, ops.norm(both, norms.after, eps))

        return feed_forward


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder of a Gemma4ForCausalLM, or of a Gemma4ForConditionalGeneration."""
    text = fields.group("text_config") if fields.has("text_config") else fields
    text.refuse_unless("use_bidirectional_attention", False, "vision")  # what images do is no matter of texts
    biased, layers = text.flag("attention_bias", False), _layers(text)
    plain = plain_decoder(text, layers, activation_key="hidden_activation", tied=True, reads=_READS)
    if input_len := text.integer("hidden_size_per_layer_input", 256, least=0):
        text.refuse_unless("vocab_size_per_layer_input", plain.vocab_size)
    width, num_shared = plain.intermediate_size, sum(kind.shares is not None for kind in layers)
    widths = [width * (1 + (text.flag("use_double_wide_mlp", False) and kind.shares is not None)) for kind in layers]
    experts = _experts(text) if text.flag("enable_moe_block", False) else None
    feeds = [_feed(own, width, experts) for own in widths]
    return replace(
        plain,
        layers=tuple(replace(kind, feed_forward=feed) for kind, feed in zip(layers, feeds, strict=True)),
        feeds=tuple(Feed(width=own) for own in dict.fromkeys(widths)) + (() if experts is None else experts.feeds),
        tied=fields.flag("tie_word_embeddings", plain.tied),
        scale=1.0,  # of the products of queries and keys, which are normed
        qkv_bias=biased,
        out_bias=biased,
        qk_norm=True,
        value_norm=True,
        norms=_NORMS,
        names=_names(fields.has("text_config"), len(layers) - num_shared, len(layers)),
        embed_scale=plain.hidden_size**0.5,
        input_len=input_len or None,
        layer_scales=True,
        logit_cap=text.number("final_logit_softcapping") if text.has("final_logit_softcapping") else None,
    )


def _names(is_nested: bool, first_shared: int, num_layers: int) -> TensorNames:
    root = "model.language_model." if is_nested else "model."
    unused = [
        f"{root}layers.{number}.self_attn.{name}." for number in range(first_shared, num_layers) for name in _UNUSED
    ]
    return TensorNames(root=root, others=(*unused, *(f"model.{name}" for name in _NOT_TEXT)))


def _layers(text: Fields) -> tuple[LayerKind, ...]:
    number = text.integer("num_hidden_layers")
    types = layer_types(text, tuple(FULL if layer % 6 == 0 else SLIDING for layer in range(1, number + 1)))
    types = (*types[:-1], FULL)  # the last one is full whatever a config says
    ropes, window = _ropes(text), text.integer("sliding_window", 512)
    keys_are_values, shares = text.flag("attention_k_eq_v", False), _shares(text, types)
    return tuple(
        LayerKind(
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            heads=_heads(text, layer, kind),
            values_are_keys=keys_are_values and kind == FULL,
            shares=shares[layer],
        )
        for layer, kind in enumerate(types)
    )


def _ropes(text: Fields) -> dict[str, Rope]:
    group = text.group("rope_parameters")
    group.refuse_others((FULL, SLIDING))
    if not text.has("rope_parameters"):
        return {FULL: Rope(theta=1000000.0, pairs_share=0.25), SLIDING: Rope(theta=10000.0)}
    return {kind: rope_of(group.group(kind), theta) for kind, theta in ((FULL, 1000000.0), (SLIDING, 10000.0))}


def _heads(text: Fields, layer: int, kind: str) -> Heads | None:
    """The heads of a layer, where it has its own: of full layers, or listed layer by layer."""
    num_kv_heads, head_dim = text.integer("num_key_value_heads"), text.integer("head_dim")
    if text.has("per_layer_config"):
        own = text.group("per_layer_config").group(str(layer))
        own.refuse_others(("head_dim", "num_key_value_heads"))
        num_kv_heads, head_dim = own.integer("num_key_value_heads", num_kv_heads), own.integer("head_dim", head_dim)
        return Heads(num_kv_heads=num_kv_heads, head_dim=head_dim, scale=1.0) if list(own) else None
    if kind != FULL:
        return None
    if text.flag("attention_k_eq_v", False):
        num_kv_heads = text.integer("num_global_key_value_heads", num_kv_heads)
    return Heads(num_kv_heads=num_kv_heads, head_dim=text.integer("global_head_dim", 512), scale=1.0)


def _shares(text: Fields, types: Sequence[str]) -> list[int | None]:
    """For each layer the one whose KV it reads: of the last ones, the last of their type in front of them."""
    num_shared = text.integer("num_kv_shared_layers", 0, least=0)
    keeping = list(types[: max(0, len(types) - num_shared)])
    if set(keeping) != set(types):
        raise text.wrong("num_kv_shared_layers", f"is {num_shared}: in front of these no layer of a type keeps KV")
    last = {kind: len(keeping) - 1 - keeping[::-1].index(kind) for kind in keeping}
    return [None] * len(keeping) + [last[kind] for kind in types[len(keeping) :]]


def _experts(text: Fields) -> ExpertsFeed:
    return ExpertsFeed(
        num_experts=text.integer("num_experts"),
        num_active=text.integer("top_k_experts"),
        width=text.integer("moe_intermediate_size"),
        is_normed=True,
    )


def _feed(width: int, usual: int, experts: ExpertsFeed | None) -> WideFeed | BesideExperts | None:
    """What makes a layer's feed-forward; None: the config's own."""
    if experts is not None:
        return BesideExperts(width=width, experts=experts)
    return None if width == usual else WideFeed(width=width)


FAMILY = Family(
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    draft_hooks=True,
    read_config=read_config,
    load=Decoder,
)
