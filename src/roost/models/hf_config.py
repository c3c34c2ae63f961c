"""What the config.json files of decoder families have in common: sizes, ropes, windows, and options that are refused.

Both styles are read: rope_theta with rope_scaling, and rope_parameters, which transformers writes since version 5. An
option that would change the output is refused by name unless it is supported or neutral. Called by the families.
"""

from math import log

from roost.layers.ops import ACTIVATIONS
from roost.layers.rotary import Bands, Rope, Yarn
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.fields import Fields

FULL, SLIDING = "full_attention", "sliding_attention"

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "factors": ("factors",),  # our own word for what GGUF files state: a divisor of each frequency
    "proportional": ("factor", "partial_rotary_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
# option -> values that leave the output as it is
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (1,),
    "mlp_bias": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "use_bidirectional_attention": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
}


def plain_decoder(
    fields: Fields,
    layers: tuple[LayerKind, ...],
    *,
    activation_key: str = "hidden_act",
    activation: str | None = None,
    norm_eps_key: str = "rms_norm_eps",
    width: int | None = None,
    tied: bool = False,
    reads: tuple[str, ...] = (),
) -> DecoderConfig:
    """A decoder with the sizes of a config and nothing special.

    `tied` is what a config without `tie_word_embeddings` means, `activation` one without an activation; `width` is that
    of the feed-forward where the family reads it; `reads` are the options that the family itself reads, which are
    refused otherwise.
    """
    for name, values in _NEUTRAL.items():
        if name not in reads:
            fields.refuse_unless(name, *values)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    # a size that is left out is guessed as transformers does; a wrong guess shows in the shapes of the tensors
    head_dim = fields.integer("head_dim", max(1, hidden_size // num_heads))
    return DecoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=width or fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        context_max=fields.integer("max_position_embeddings"),
        layers=layers,
        scale=head_dim**-0.5,
        norm_eps=fields.number(norm_eps_key),
        tied=fields.flag("tie_word_embeddings", tied),
        activation=fields.choice(activation_key, ACTIVATIONS, activation),
    )


def layer_types(fields: Fields, otherwise: tuple[str, ...]) -> tuple[str, ...]:
    """What each layer attends to: `layer_types` of the config, or `otherwise` where it has none."""
    if not fields.has("layer_types"):
        return otherwise
    types = fields.choices("layer_types", (FULL, SLIDING))
    if len(types) != len(otherwise):
        raise fields.wrong("layer_types", f"has {len(types)} entries for {len(otherwise)} layers")
    return types


def uniform_layers(fields: Fields, *, window: int | None) -> tuple[LayerKind, ...]:
    """Layers that are all alike, all with a window or none."""
    types = (FULL if window is None else SLIDING,) * fields.integer("num_hidden_layers")
    found = layer_types(fields, types)
    if found != types:
        raise fields.wrong("layer_types", f"must be {types[0]} for every layer of this family, got {list(found)}")
    return (LayerKind(rope=read_rope(fields), window=window),) * len(types)


def read_rope(fields: Fields, *, theta: float = 10000.0, reads: tuple[str, ...] = ()) -> Rope:
    """The one rope of a config, in either style; `theta` counts where it does not say it.

    `reads` are options that the family itself reads, which are refused otherwise.
    """
    if fields.has("rope_parameters") and fields.has("rope_scaling"):
        raise fields.wrong("rope_scaling", "and rope_parameters are both there; which one counts is unclear")
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    return rope_of(fields.group(name), fields.number("rope_theta", theta), reads)


def rope_of(group: Fields, theta: float, reads: tuple[str, ...] = ()) -> Rope:
    """A rope described by one object; `theta` counts where the object does not say it; `reads` as above."""
    type_key = "rope_type" if group.has("rope_type") else "type"  # `type` is the older name
    kind = group.choice(type_key, _ROPE_KEYS, "default")
    keys = _ROPE_KEYS[kind]
    if "partial_rotary_factor" not in (*reads, *keys):
        group.refuse_unless("partial_rotary_factor", 1)
    group.refuse_others(("rope_type", "type", "rope_theta", "partial_rotary_factor", *keys, *reads))
    theta = group.number("rope_theta", theta)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "factors":
        return Rope(theta=theta, divisors=group.numbers("factors"))
    if kind == "proportional":
        share = group.number("partial_rotary_factor", 1.0)
        if share > 1:
            raise group.wrong("partial_rotary_factor", f"must be at most 1, got {share:g}")
        return Rope(theta=theta, factor=group.number("factor", 1.0), pairs_share=share)
    factor = group.number("factor")
    if kind == "yarn":
        return Rope(theta=theta, factor=factor, yarn=_yarn(group, theta), length=_yarn_length(group, factor))
    return Rope(theta=theta, factor=factor, bands=_bands(group) if kind == "llama3" else None)


def _bands(group: Fields) -> Bands:
    bands = Bands(
        low_freq_factor=group.number("low_freq_factor"),
        high_freq_factor=group.number("high_freq_factor"),
        original_len=group.integer("original_max_position_embeddings"),
    )
    if bands.low_freq_factor >= bands.high_freq_factor:
        raise group.wrong("low_freq_factor", f"must be below high_freq_factor, {bands.high_freq_factor:g}")
    return bands


def _yarn(group: Fields, theta: float) -> Yarn:
    yarn = Yarn(
        beta_fast=group.number("beta_fast", 32.0),
        beta_slow=group.number("beta_slow", 1.0),
        original_len=group.integer("original_max_position_embeddings"),
        truncate=group.flag("truncate", True),
    )
    if yarn.beta_slow > yarn.beta_fast:
        raise group.wrong("beta_slow", f"must not be above beta_fast, {yarn.beta_fast:g}")
    if theta <= 1:
        raise group.wrong("rope_theta", f"must be above 1 for yarn, got {theta:g}")
    return yarn


def _yarn_length(group: Fields, factor: float) -> float:
    """What YaRN multiplies queries and keys by: stated, or by how far positions are stretched."""
    if group.has("attention_factor"):
        return group.number("attention_factor")

    def at(scale: str | None) -> float:
        return 1.0 if factor <= 1 else 0.1 * (1.0 if scale is None else group.number(scale)) * log(factor) + 1.0

    has_both = group.has("mscale") and group.has("mscale_all_dim")
    return at("mscale") / at("mscale_all_dim") if has_both else at(None)
