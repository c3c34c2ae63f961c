"""Names of a layer's tensors, as checkpoints have them; families say where theirs are others.

Read by the loader of layers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """The norms of a layer, as checkpoints name them; None where a family has none."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None
    before_feed: str = "post_attention_layernorm"
    after_feed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The other tensors of a layer, as checkpoints name them, and the last norm."""

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    delta: str = "linear_attn."  # before the names of a gated delta rule's tensors
    last_norm: str = "norm"
    root: str = "model."  # before the names of layers, the embedding and the last norm
    others: tuple[str, ...] = ()  # what the names of tensors begin with that are none of the decoder's
