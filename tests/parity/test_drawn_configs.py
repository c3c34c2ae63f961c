"""Families whose configs say much: ten drawn ones each equal transformers, dense, in pages, in chunks and greedily."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.tiny_models import OFFSET_NORMS, SHAPE, Served, Tiny, configure, prompts, randomised
from tests.support.workload import logits_in_one_pass

SEEDS = range(10)
NUM_NEW = 64


def sizes(chances: random.Random) -> dict[str, Any]:
    """Sizes that all have."""
    num_kv_heads = chances.choice((1, 2, 3))
    return {
        **SHAPE,
        "hidden_size": chances.choice((24, 40, 64)),
        "intermediate_size": chances.choice((24, 56)),
        "num_hidden_layers": chances.choice((2, 3, 5)),
        "num_attention_heads": num_kv_heads * chances.choice((1, 2, 4)),
        "num_key_value_heads": num_kv_heads,
        "head_dim": chances.choice((4, 8, 16)),
        "tie_word_embeddings": chances.random() < 0.3,
    }


def qwen3_moe(chances: random.Random) -> PreTrainedModel:
    """Experts in some layers or in all."""
    num_experts = chances.choice((2, 4, 9))
    config = Qwen3MoeConfig(
        **sizes(chances),
        num_experts=num_experts,
        num_experts_per_tok=chances.randint(1, min(4, num_experts)),
        moe_intermediate_size=chances.choice((8, 20)),
        norm_topk_prob=chances.random() < 0.5,
        decoder_sparse_step=chances.choice((1, 1, 2)),
        mlp_only_layers=chances.choice(([], [0], [1])),
        attention_bias=chances.random() < 0.5,
        use_sliding_window=(sliding := chances.random() < 0.3),
        sliding_window=7 if sliding else None,
    )
    return Qwen3MoeForCausalLM(config)


def gpt_oss(chances: random.Random) -> PreTrainedModel:
    """Windows in some layers, sinks in all, experts with biases, YaRN of any kind."""
    own, num_experts = sizes(chances), chances.choice((2, 4, 9))
    rope = {
        "rope_type": "yarn",
        "rope_theta": chances.choice((90.0, 700.0, 150000.0)),
        "factor": chances.choice((1.0, 4.0, 32.0)),
        "beta_fast": chances.choice((4.0, 32.0)),
        "beta_slow": chances.choice((0.3, 1.0)),
        "original_max_position_embeddings": chances.choice((16, 64, 4096)),
        "truncate": chances.random() < 0.5,
        **chances.choice(({}, {}, {"attention_factor": 0.8}, {"mscale": 0.7, "mscale_all_dim": 1.3})),
    }
    config = GptOssConfig(
        **{**own, "rope_parameters": rope},
        num_local_experts=num_experts,
        num_experts_per_tok=chances.randint(1, min(4, num_experts)),
        sliding_window=chances.choice((2, 5, 20)),  # of 1 transformers' own cache keeps everything
        layer_types=[chances.choice(("sliding_attention", "full_attention")) for _ in range(own["num_hidden_layers"])],
        attention_bias=chances.random() < 0.7,
    )
    return GptOssForCausalLM(config)


def lfm2(chances: random.Random) -> PreTrainedModel:
    """Short convolutions of some length, and attention in some of the other layers."""
    own = {name: value for name, value in sizes(chances).items() if name not in ("head_dim", "rms_norm_eps")}
    own["hidden_size"] = own["num_attention_heads"] * chances.choice((4, 8))
    types = [chances.choice(("conv", "full_attention")) for _ in range(own["num_hidden_layers"] - 2)]
    config = Lfm2Config(
        **own,
        layer_types=chances.sample(["conv", "full_attention", *types], own["num_hidden_layers"]),
        conv_L_cache=chances.choice((2, 3, 4, 7)),
        conv_bias=chances.random() < 0.5,
        block_auto_adjust_ff_dim=chances.random() < 0.5,
        block_ffn_dim_multiplier=chances.choice((0.5, 1.0, 1.3)),
        block_multiple_of=8,
        norm_eps=0.01,
    )
    return Lfm2ForCausalLM(config)


def hybrid(chances: random.Random) -> dict[str, Any]:
    """Recurrent layers in most places, and attention that rotates a part of each head."""
    number, num_key_heads = chances.choice((2, 3, 5)), chances.choice((1, 2))
    types = [chances.choice(("linear_attention", "linear_attention", "full_attention")) for _ in range(number - 2)]
    return {
        **sizes(chances),
        "initializer_range": 0.2,  # what transformers computes by chunks in float32 is further off with wide ones
        "num_hidden_layers": number,
        "layer_types": chances.sample(["linear_attention", "full_attention", *types], number),
        "head_dim": chances.choice((8, 16)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 700.0,
            "partial_rotary_factor": chances.choice((0.25, 0.5, 1.0)),
        },
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * chances.choice((1, 2, 3)),
        "linear_key_head_dim": chances.choice((4, 8)),
        "linear_value_head_dim": chances.choice((4, 12)),
        "linear_conv_kernel_dim": chances.choice((2, 3, 4)),
        "attention_bias": chances.random() < 0.3,
    }


def qwen3_5(chances: random.Random) -> PreTrainedModel:
    """Dense."""
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**hybrid(chances)))


def qwen3_5_moe(chances: random.Random) -> PreTrainedModel:
    """Experts in every layer, and one that every token goes through."""
    num_experts = chances.choice((2, 4, 9))
    config = Qwen3_5MoeTextConfig(
        **hybrid(chances),
        num_experts=num_experts,
        num_experts_per_tok=chances.randint(1, min(4, num_experts)),
        moe_intermediate_size=chances.choice((8, 20)),
        shared_expert_intermediate_size=chances.choice((8, 24)),
    )
    return Qwen3_5MoeForCausalLM(config)


def gemma4(chances: random.Random) -> PreTrainedModel:
    """Windows and full layers, whose heads differ or not; the last ones share KV or not; experts or not."""
    own, (full, sliding) = sizes(chances), ("full_attention", "sliding_attention")
    number, num_kv_heads = chances.choice((3, 5, 6)), own["num_key_value_heads"]
    num_shared = chances.choice((0, 1, number - 2))
    keeping = [full, sliding, *(chances.choice((full, sliding)) for _ in range(number - num_shared - 2))]
    types = chances.sample(keeping, len(keeping)) + [chances.choice((full, sliding)) for _ in range(num_shared)]
    if num_shared == 0:  # the last layer is full whatever the config says
        types.append(types.pop(types.index(full)))
    own |= {"num_hidden_layers": number, "layer_types": types, "sliding_window": chances.choice((5, 16))}
    config = Gemma4TextConfig(
        **own
        | {
            "rope_parameters": {
                full: {
                    "rope_type": "proportional",
                    "rope_theta": 3000.0,
                    "partial_rotary_factor": chances.choice((0.1, 0.25, 0.5, 1.0)),
                },
                sliding: {"rope_type": "default", "rope_theta": 300.0},
            }
        },
        global_head_dim=chances.choice((8, 16, 24)),
        attention_k_eq_v=chances.random() < 0.5,
        num_global_key_value_heads=chances.choice((None, 1, num_kv_heads)),
        num_kv_shared_layers=num_shared,
        use_double_wide_mlp=chances.random() < 0.5,
        # transformers generates without them only where no layer shares
        hidden_size_per_layer_input=chances.choice((5, 16) if num_shared else (0, 16)),
        vocab_size_per_layer_input=SHAPE["vocab_size"],
        final_logit_softcapping=chances.choice((None, 3.0, 30.0)),
        attention_bias=chances.random() < 0.3,
        enable_moe_block=chances.random() < 0.3,
        num_experts=4,
        top_k_experts=chances.choice((1, 3)),
        moe_intermediate_size=chances.choice((8, 20)),
    )
    return Gemma4ForCausalLM(config)


FAMILIES: dict[str, Callable[[random.Random], PreTrainedModel]] = {
    "qwen3-moe": qwen3_moe,
    "gpt-oss": gpt_oss,
    "lfm2": lfm2,
    "qwen3.5": qwen3_5,
    "qwen3.5-moe": qwen3_5_moe,
    "gemma4": gemma4,
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_config_equals_transformers(family: str, seed: int) -> None:
    chances = random.Random(seed)
    torch.manual_seed(seed)
    drawn = Tiny(
        reference=randomised(FAMILIES[family](chances), least_norm=-0.5 if family.startswith(OFFSET_NORMS) else 0.5)
    )
    (prompt,), model = prompts(40, seed=seed), drawn.model()
    with torch.no_grad():
        wanted = drawn.reference(torch.tensor([prompt])).logits[0]
        output = drawn.reference.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False)
    torch.testing.assert_close(logits_in_one_pass(model, prompt), wanted, atol=1e-4, rtol=1e-4)
    served = Served(model, configure(page_size=chances.choice((1, 4, 16)), chunk=chances.choice((5, 512))))
    served.submit("r", prompt, NUM_NEW)
    served.run()
    served.executor.close()
    assert served.output("r") == tuple(output[0, len(prompt) :].tolist())
