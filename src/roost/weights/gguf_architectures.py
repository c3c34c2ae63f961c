"""GGUF's architectures: how each names its tensors, how it stores them, and which config.json it stands for.

What llama.cpp's converters do to a checkpoint, told so that it can be undone: rows of queries and keys in interleaved
pairs, norms with one added, all experts of a layer in one tensor. Never reads a file. Read by `weights.gguf`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from roost.models.hf_config import FULL, SLIDING

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMED = _LAYER | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = _NORMED | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_GEMMA_LOCAL_THETA, _GEMMA_27B_LAYERS = 10000.0, 62  # which no file states


class Metadata(Protocol):
    """What a file says of itself."""

    def value(self, key: str, default: object = None) -> object:
        """The value of an architecture's key, by its name behind the architecture's; refused where it is missing."""
        ...

    def head_dim(self) -> int:
        """Length of a head."""
        ...

    def rope(self) -> dict[str, object]:
        """The rope of the file, as `rope_parameters` says it."""
        ...


def _plain(file: Metadata) -> dict[str, object]:
    return {"hidden_act": "silu", "rope_parameters": file.rope()}


def _qwen3_moe(file: Metadata) -> dict[str, object]:
    return {
        **_plain(file),
        "num_experts": file.value("expert_count"),
        "num_experts_per_tok": file.value("expert_used_count"),
        "moe_intermediate_size": file.value("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp runs them
    }


def _gemma3(file: Metadata) -> dict[str, object]:
    hidden, heads = file.value("embedding_length"), file.value("attention.head_count")
    assert isinstance(hidden, int) and isinstance(heads, int)
    is_27b = file.value("block_count") == _GEMMA_27B_LAYERS
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if is_27b else file.head_dim(),
        "sliding_window": file.value("attention.sliding_window"),
        "rope_parameters": {
            FULL: file.rope(),
            SLIDING: {"rope_type": "default", "rope_theta": _GEMMA_LOCAL_THETA},
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One architecture."""

    name: str  # in front of its keys
    model: str  # as config.json names it
    config: Callable[[Metadata], dict[str, object]] = _plain  # besides the sizes
    names: Mapping[str, str] = field(default_factory=lambda: _LAYER)  # of a layer's tensors: Hugging Face's
    experts: Mapping[str, str] = field(default_factory=dict)  # the same of tensors that hold one matrix for each expert
    router: str | None = None  # the tensor that scores experts
    is_paired: bool = False  # rows of queries and keys that rotate together lie side by side
    norm_offset: float = 0.0  # added to the weights of norms
    theta: float = 10000.0  # of the rope, where a file does not say it


ARCHITECTURES = {
    each.name: each
    for each in (
        Architecture(name="llama", model="LlamaForCausalLM", is_paired=True),
        Architecture(name="qwen2", model="Qwen2ForCausalLM"),
        Architecture(name="qwen3", model="Qwen3ForCausalLM", names=_NORMED),
        Architecture(
            name="qwen3moe",
            model="Qwen3MoeForCausalLM",
            config=_qwen3_moe,
            names=_NORMED,
            experts=_EXPERTS,
            router="ffn_gate_inp",
        ),
        Architecture(name="gemma3", model="Gemma3ForCausalLM", config=_gemma3, names=_GEMMA, norm_offset=1.0),
    )
}
