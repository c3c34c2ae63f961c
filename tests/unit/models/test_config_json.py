"""A config.json means the same in either style, and what it asks for beyond that is refused by name."""

from dataclasses import replace

import pytest

from roost.errors import ConfigError
from roost.layers.gated_delta import DeltaShape
from roost.layers.rotary import Bands, Rope
from roost.models.registry import FAMILIES, decoder_config, find_family
from tests.support.config_files import (
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    LFM2,
    LLAMA,
    LLAMA3_SCALING,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    Config,
    without,
)

# --- both styles ----------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
NEWER = [
    (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    (
        {**LLAMA, "rope_scaling": LLAMA3_SCALING},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 500.0, **LLAMA3_SCALING}},
    ),
    (
        {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.0}},
    ),
    (MISTRAL, {"rope_parameters": {"rope_theta": 500.0}, "layer_types": ["sliding_attention"] * 3}),
    (
        {**QWEN2, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "max_window_layers": 28},
    ),
    (QWEN3, {"layer_types": ["full_attention"] * 3, "sliding_window": None}),
    (QWEN3_MOE, {"num_experts": None, "num_local_experts": 4, "mlp_only_layers": [], "decoder_sparse_step": 1}),
    (
        LFM2,
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "full_attn_idxs": None,
            "block_ff_dim": None,
            "intermediate_size": 24,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
    ),
    (
        GPT_OSS,
        {
            "layer_types": None,
            "rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": 150000.0, **YARN, "factor": 32.0, "truncate": False},
            "swiglu_alpha": 1.702,
        },
    ),
    (
        GEMMA3,
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window_pattern": None,
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
            },
        },
    ),
]


@pytest.mark.parametrize(("older", "changes"), NEWER)
def test_both_styles_of_a_config_mean_the_same(older: Config, changes: Config) -> None:
    assert decoder_config({**older, **changes}) == decoder_config(older)


def test_a_theta_inside_rope_parameters_counts() -> None:
    newer = {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}
    assert decoder_config(newer) == decoder_config(LLAMA)


def test_the_older_style_is_read_as_it_was_meant() -> None:
    scaled = decoder_config({**LLAMA, "rope_scaling": LLAMA3_SCALING})
    bands = Bands(low_freq_factor=1.0, high_freq_factor=4.0, original_len=64)
    assert {layer.rope for layer in scaled.layers} == {Rope(theta=500.0, factor=8.0, bands=bands)}
    gemma = decoder_config(GEMMA3)
    local, wide = Rope(theta=90.0), Rope(theta=9000.0, factor=8.0)
    assert [(layer.rope, layer.window) for layer in gemma.layers] == [(local, 8), (local, 8), (wide, None)]
    assert (gemma.tied, gemma.scale, gemma.embed_scale) == (True, 0.25, 12**0.5)
    assert [layer.window for layer in decoder_config(MISTRAL).layers] == [8, 8, 8]
    assert [layer.window for layer in decoder_config({**MISTRAL, "sliding_window": None}).layers] == [None] * 3
    assert [layer.window for layer in decoder_config(QWEN2).layers] == [None] * 3
    assert [layer.window for layer in decoder_config({**QWEN2, "use_sliding_window": True}).layers] == [None, 8, 8]
    assert not decoder_config(LLAMA).tied


def test_what_old_llama_configs_leave_out_is_what_it_was_then() -> None:
    old = decoder_config(without(LLAMA, "num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"))
    assert (old.num_kv_heads, old.head_dim, old.tied) == (6, 2, False)
    assert old.layers[0].rope == Rope(theta=10000.0)


# --- refusals -------------------------------------------------------------------------------------------------

REFUSED = [
    (LLAMA, {"architectures": None}, "architectures is missing; it must name the model's architecture"),
    (
        LLAMA,
        {"architectures": ["FalconForCausalLM"]},
        "the architecture FalconForCausalLM is not known; known are "
        + ", ".join(name for family in FAMILIES for name in family.architectures),
    ),
    (
        GEMMA3,
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        "Gemma3ForConditionalGeneration reads images, which is not supported; text models are: LlamaForCausalLM,",
    ),
    (LLAMA, {"hidden_size": None}, "hidden_size is missing"),
    (LLAMA, {"rms_norm_eps": None}, "rms_norm_eps is missing"),
    (LLAMA, {"hidden_act": None}, "hidden_act is missing"),
    (GEMMA3, {"query_pre_attn_scalar": None}, "query_pre_attn_scalar is missing"),
    (GEMMA3, {"sliding_window": None}, "sliding_window is missing"),
    (QWEN2, {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers is missing"),
    (QWEN2, {"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, got 0"),
    (LLAMA, {"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, got 'many'"),
    (LLAMA, {"rope_theta": True}, "rope_theta must be a number above 0, got True"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
    (LLAMA, {"hidden_act": "relu"}, "hidden_act is 'relu', which is not supported; known are silu, gelu_pytorch_tanh"),
    (
        LLAMA,
        {"rope_scaling": {"type": "dynamic"}},
        "rope_scaling.type is 'dynamic', which is not supported; known are default, ",
    ),
    (
        LLAMA,
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters.rope_type is 'longrope', which is not supported; known are",
    ),
    (
        LLAMA,
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_scaling.original_max_position_embeddings is missing",
    ),
    (
        LLAMA,
        {"rope_scaling": {**YARN, "beta_slow": 40.0}},
        "rope_scaling.beta_slow must not be above beta_fast, 32",
    ),
    (LLAMA, {"rope_scaling": {**YARN, "beta": 40.0}}, "rope_scaling.beta is not supported; known here are"),
    (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    (LLAMA, {"rope_scaling": [4.0]}, "rope_scaling must be an object, got [4.0]"),
    (
        LLAMA,
        {"rope_scaling": {**LLAMA3_SCALING, "original_max_position_embeddings": None}},
        "rope_scaling.original_max_position_embeddings is missing",
    ),
    (
        LLAMA,
        {"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}},
        "rope_scaling.low_freq_factor must be below high_freq_factor, 4",
    ),
    (LLAMA, {"rope_scaling": {"type": "default", "mrope_section": [2]}}, "rope_scaling.mrope_section is not supported"),
    (LLAMA, {"rope_scaling": YARN, "rope_parameters": YARN}, "rope_scaling and rope_parameters are both there"),
    (
        QWEN3,
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
        "rope_parameters.full_attention is not supported",
    ),
    (GEMMA3, {"rope_scaling": None, "rope_parameters": {"factor": 2}}, "rope_parameters.factor is not supported"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which is not supported"),
    (
        LLAMA,
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor is 0.5, which is not supported",
    ),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is True, which is not supported"),
    (LLAMA, {"layer_types": ["sliding_attention"] * 3}, "layer_types must be full_attention for every layer"),
    (MISTRAL, {"attention_bias": True}, "attention_bias is True, which is not supported"),
    (GEMMA3, {"attention_bias": True}, "attention_bias is True, which is not supported"),
    (QWEN2, {"attention_bias": False}, "attention_bias is False, which is not supported"),
    (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not supported"),
    (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
    (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    (GEMMA3, {"layer_types": ["chunked_attention"] * 3}, "layer_types is 'chunked_attention', which is not supported"),
    (QWEN3, {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention, but use_sliding_window"),
]


@pytest.mark.parametrize(("config", "changes", "said"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config: Config, changes: Config, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        decoder_config({**config, **changes})
    assert str(refusal.value).startswith(f"config.json: {said}")


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN3, GEMMA3])
def test_options_that_change_nothing_are_accepted(config: Config) -> None:
    neutral = {
        "partial_rotary_factor": 1.0,
        "mlp_bias": False,
        "attention_bias": False,
        "final_logit_softcapping": None,
        "use_cache": True,
        "transformers_version": "4.30",
    }
    assert decoder_config({**config, **neutral}) == decoder_config(config)


def test_a_config_that_no_decoder_can_have_is_refused() -> None:
    config = decoder_config(MISTRAL)
    with pytest.raises(ConfigError, match="6 heads do not share 4 KV heads"):
        replace(config, num_kv_heads=4)
    with pytest.raises(ConfigError, match="head_dim must be even for rotary positions, got 5"):
        replace(config, head_dim=5)
    with pytest.raises(ConfigError, match="activation relu is not known"):
        replace(config, activation="relu")
    with pytest.raises(ConfigError, match="windows of different lengths"):
        replace(config, layers=(config.layers[0], replace(config.layers[0], window=4)))


def test_what_a_config_of_short_convolutions_leaves_out_is_what_its_first_models_had() -> None:
    plain = decoder_config(LFM2)
    assert [layer.conv_len for layer in plain.layers] == [4, None, 4]
    assert (plain.intermediate_size, plain.head_dim, plain.tied, plain.norm_eps) == (20, 4, True, 1e-5)
    bare = decoder_config(without(LFM2, "conv_L_cache", "conv_bias", "rope_theta", "block_multiple_of"))
    assert (bare.layers[0].conv_len, bare.layers[1].rope.theta, bare.intermediate_size) == (3, 1e6, 256)
    assert decoder_config({**LFM2, "block_auto_adjust_ff_dim": False}).intermediate_size == 24


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"conv_L_cache": 1}, "conv_L_cache must be a whole number of at least 2"),
        ({"layer_types": ["conv", "full_attention"]}, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["conv", "mamba", "conv"]}, "'mamba', which is not supported; known are full_attention, conv"),
        ({"full_attn_idxs": 1}, "full_attn_idxs must be a list"),
        ({"norm_eps": 0}, "norm_eps must be a number above 0"),
    ],
)
def test_convolutions_that_cannot_be_run_are_refused_by_name(changes: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decoder_config({**LFM2, **changes})


def beside_images(text: Config, architecture: str) -> Config:
    """The same text model as a part of one that reads images."""
    return {"architectures": [architecture], "text_config": without(text, "architectures"), "image_token_id": 3}


def test_a_hybrid_is_the_same_alone_and_beside_images() -> None:
    plain = decoder_config(QWEN3_5)
    assert [layer.attends for layer in plain.layers] == [False, True, False, True]
    assert (plain.out_gate, plain.norm_offset, plain.layers[0].rope.rotated_len) == (True, 1.0, 2)
    assert plain.layers[0].delta == DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=4, value_dim=6, conv_len=3)
    nested = decoder_config(beside_images(QWEN3_5, "Qwen3_5ForConditionalGeneration"))
    assert nested.names.root == "model.language_model."
    assert replace(nested, names=plain.names) == plain
    mixture = decoder_config(QWEN3_5_MOE)
    nested = decoder_config(beside_images(QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration"))
    assert replace(nested, names=mixture.names, feed_forward=mixture.feed_forward) == mixture
    assert nested.feed_forward == mixture.feed_forward


def test_what_a_config_of_a_hybrid_leaves_out_is_what_its_first_models_had() -> None:
    bare = decoder_config(without(QWEN3_5, "full_attention_interval", "linear_conv_kernel_dim", "attn_output_gate"))
    assert [layer.attends for layer in bare.layers] == [False, False, False, True]
    assert bare.layers[0].delta is not None and bare.layers[0].delta.conv_len == 4
    whole = decoder_config({**QWEN3_5, "partial_rotary_factor": 1.0})
    assert whole.layers[0].rope.rotated_len is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3, not a multiple of 2 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be a whole number of at least 2"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "'sliding_attention', which is not supported; known are"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid', which is not supported"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', which is not supported"),
        ({"partial_rotary_factor": 0.375}, "partial_rotary_factor is 0.375: of 8 dimensions an even number must"),
        ({"partial_rotary_factor": 2.0}, "of 8 dimensions an even number must rotate"),
        ({"attn_output_gate": False}, "attn_output_gate"),
    ],
)
def test_hybrids_that_cannot_be_run_are_refused_by_name(changes: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decoder_config({**QWEN3_5, **changes})


def test_sinks_windows_and_experts_of_gpt_oss_are_read_as_published() -> None:
    config = decoder_config(GPT_OSS)
    assert [layer.window for layer in config.layers] == [8, None, 8]
    assert (config.sinks, config.qkv_bias, config.out_bias, config.activation) == (True, True, True, "silu")
    assert config.layers[0].rope.length == pytest.approx(1.3465736)
    assert config.layers[0].rope.yarn is not None and not config.layers[0].rope.yarn.truncate


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, which is not supported"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5, which is not supported"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act is 'gelu_pytorch_tanh', which is not supported"),
        ({"num_local_experts": None}, "num_local_experts is missing"),
        ({"num_experts_per_tok": 5}, "go through 5 of 4 experts"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({"layer_types": ["chunked_attention"] * 3}, "'chunked_attention', which is not supported"),
        ({"rope_scaling": {**YARN, "mscale_all_dims": 1.0}}, "rope_scaling.mscale_all_dims is not supported"),
        ({"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate must be true or false, got 1"),
    ],
)
def test_what_gpt_oss_cannot_be_is_refused_by_name(changes: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decoder_config({**GPT_OSS, **changes})


def test_families_are_found_by_their_architecture_and_offer_hooks_to_draft_heads() -> None:
    configs = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, GEMMA3, LFM2, QWEN3_5, QWEN3_5_MOE, GEMMA4, GPT_OSS)
    found = [find_family(config) for config in configs]
    assert found == list(FAMILIES)
    assert all(family.draft_hooks for family in found)
