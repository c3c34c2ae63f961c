"""Decoding with transformers' own `generate` in the shapes of `bench.gpu_shapes`, with random weights, eager.

Hybrids run there without the kernels of other packages. Called by `bench.gpu_table`.
"""

import gc
import time
from typing import Any

import torch

from bench.gpu_shapes import experts_of
from roost.models.decoder_layers import DecoderConfig
from roost.models.gpt_oss import BiasedExperts


def transformers_ms(config: DecoderConfig, batch: int, device: torch.device, num_new: int = 48) -> float:
    """Milliseconds per output token, with the cache that it chooses."""
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = _model(config)
    torch.set_default_dtype(torch.float32)
    tokens = torch.randint(config.vocab_size, (batch, 512), device=device)
    seconds = {}
    for length in (2, 2, num_new + 2):
        began = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )
        torch.cuda.synchronize() if device.type == "cuda" else None
        seconds[length] = time.perf_counter() - began
    del model
    gc.collect()
    return 1e3 * (seconds[num_new + 2] - seconds[2]) / num_new


def _model(config: DecoderConfig) -> Any:
    """The model that transformers has for such a config."""
    import transformers  # noqa: PLC0415 (only for this)

    first = config.layers[0]
    experts = experts_of(first)
    sizes: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied,
        "pad_token_id": None,
    }
    if isinstance(first.feed_forward, BiasedExperts):
        assert experts is not None
        sizes |= {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.num_active}
        sizes |= {"intermediate_size": experts.width, "sliding_window": first.window}
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes)).eval()
    if experts is not None:
        sizes |= {"num_experts": experts.num_experts, "num_experts_per_tok": experts.num_active}
        sizes |= {"moe_intermediate_size": experts.width, "norm_topk_prob": experts.is_normed}
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).eval()
    if any(kind.conv_len is not None for kind in config.layers):
        sizes |= {"layer_types": ["full_attention" if kind.attends else "conv" for kind in config.layers]}
        sizes |= {"conv_L_cache": first.conv_len, "block_auto_adjust_ff_dim": False}
        return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**sizes)).eval()
    if first.delta is not None:
        delta, names = first.delta, ("linear_attention", "full_attention")
        sizes |= {"layer_types": [names[kind.attends] for kind in config.layers]}
        sizes |= {"linear_num_key_heads": delta.num_key_heads, "linear_num_value_heads": delta.num_value_heads}
        sizes |= {"linear_key_head_dim": delta.key_dim, "linear_value_head_dim": delta.value_dim}
        sizes |= {"linear_conv_kernel_dim": delta.conv_len}
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes)).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
