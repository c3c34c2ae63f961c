"""Small config.json files in the older style, and their tensors. Used by the tests of models and weights."""

import torch
from torch import Tensor

from roost.models.decoder_layers import DecoderConfig

Config = dict[str, object]

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 500.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
MISTRAL: Config = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
QWEN2: Config = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 8,
    "max_window_layers": 1,
}
QWEN3: Config = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}
QWEN3_MOE: Config = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
LFM2: Config = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 12,
    "block_ff_dim": 24,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "full_attn_idxs": [1],
    "conv_L_cache": 4,
    "conv_bias": False,
    "max_position_embeddings": 128,
    "norm_eps": 1e-5,
    "rope_theta": 500.0,
}
QWEN3_5: Config = {
    **{key: value for key, value in QWEN3.items() if key not in ("sliding_window", "max_window_layers")},
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "head_dim": 8,
    "attn_output_gate": True,
    "full_attention_interval": 2,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
QWEN3_5_MOE: Config = {
    **{key: value for key, value in QWEN3_5.items() if key != "intermediate_size"},
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 16,
}
GPT_OSS: Config = {  # as published, but for its sizes
    **{key: value for key, value in LLAMA.items() if key != "rope_scaling"},
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "output_router_logits": False,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
}
GEMMA3: Config = {
    **{key: value for key, value in LLAMA.items() if key not in ("hidden_act", "tie_word_embeddings")},
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "rope_theta": 9000.0,
    "rope_local_base_freq": 90.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
GEMMA4: Config = {
    **{key: value for key, value in LLAMA.items() if key not in ("hidden_act", "tie_word_embeddings", "rope_theta")},
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 5,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": [("sliding_attention", "full_attention")[is_full] for is_full in (0, 0, 1, 0, 1)],
    "sliding_window": 8,
    "global_head_dim": 8,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 11,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 9000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
    },
}
LLAMA3_SCALING: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def without(config: Config, *keys: str) -> Config:
    """A config that lacks some keys."""
    return {key: value for key, value in config.items() if key not in keys}


def llama_tensors(config: DecoderConfig) -> dict[str, Tensor]:
    """The tensors of a plain Llama, zeros."""
    hidden, wide, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    shapes["model.norm.weight"] = (hidden,)
    for number in range(len(config.layers)):
        prefix = f"model.layers.{number}."
        projections = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, query)}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
        feeds = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": shape for name, shape in feeds.items()}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
