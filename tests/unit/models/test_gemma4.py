"""A Gemma 4 config: which layers are what, in either style of the file; what cannot be run is refused by name."""

from dataclasses import replace

import pytest
import torch

from roost.errors import ConfigError
from roost.layers.rotary import Rope, frequencies
from roost.models.decoder import kv_shapes
from roost.models.decoder_layers import Heads
from roost.models.gemma4 import BesideExperts, WideFeed
from roost.models.model import KvShape
from roost.models.registry import decoder_config
from roost.runner.memory import token_bytes
from tests.support.config_files import GEMMA4, Config, without
from tests.support.tiny_models import tiny

FULL, LOCAL = Rope(theta=9000.0, pairs_share=0.5), Rope(theta=90.0)
ROPE = {"rope_type": "proportional", "rope_theta": 9000.0, "partial_rotary_factor": 0.5}


def test_late_layers_read_the_kv_of_the_last_of_their_type_that_keeps_some() -> None:
    config = decoder_config(GEMMA4)
    wide = Heads(num_kv_heads=1, head_dim=8, scale=1.0)
    found = [(kind.window, kind.rope, kind.heads, kind.values_are_keys, kind.shares) for kind in config.layers]
    assert found == [
        (8, LOCAL, None, False, None),
        (8, LOCAL, None, False, None),
        (None, FULL, wide, True, None),
        (8, LOCAL, None, False, 1),
        (None, FULL, wide, True, 2),
    ]
    assert [kind.feed_forward for kind in config.layers] == [None] * 3 + [WideFeed(width=40)] * 2
    assert (config.scale, config.embed_scale, config.input_len, config.logit_cap) == (1.0, 12**0.5, 6, 30.0)
    assert (config.tied, config.feed_width, config.norm_offset) == (True, 80, 0.0)
    unused = [name for name in config.names.others if ".layers." in name]
    assert unused[0] == "model.layers.3.self_attn.k_proj." and len(unused) == 8


def test_both_styles_of_a_config_mean_the_same() -> None:
    plain = decoder_config(GEMMA4)
    layers = {str(number): {"head_dim": 8, "num_key_value_heads": 1} for number in (2, 4)}
    newer = {**without(GEMMA4, "global_head_dim", "num_global_key_value_heads"), "per_layer_config": layers}
    assert decoder_config(newer) == plain
    nested = decoder_config(
        {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "text_config": without(GEMMA4, "architectures"),
            "vision_config": {"hidden_size": 8},
            "tie_word_embeddings": False,
        }
    )
    assert (nested.names.root, nested.tied) == ("model.language_model.", False)
    assert replace(nested, names=plain.names, tied=True) == plain


def test_what_a_config_leaves_out_is_what_its_first_models_had() -> None:
    bare = decoder_config(
        {
            **without(
                GEMMA4,
                *("layer_types", "rope_parameters", "sliding_window", "num_kv_shared_layers", "attention_k_eq_v"),
                *("hidden_size_per_layer_input", "final_logit_softcapping", "use_double_wide_mlp", "global_head_dim"),
            ),
            "num_hidden_layers": 8,
        }
    )
    assert [kind.window for kind in bare.layers] == [512] * 5 + [None, 512, None]
    assert (bare.layers[0].rope, bare.layers[5].rope) == (Rope(theta=10000.0), Rope(theta=1000000.0, pairs_share=0.25))
    assert bare.layers[5].heads == Heads(num_kv_heads=2, head_dim=512, scale=1.0)  # fewer only where values are keys
    assert not any(kind.values_are_keys or kind.shares is not None for kind in bare.layers)
    assert (bare.input_len, bare.logit_cap, bare.feed_width) == (256, None, 40)
    assert decoder_config({**GEMMA4, "hidden_size_per_layer_input": 0}).input_len is None
    assert decoder_config({**GEMMA4, "use_bidirectional_attention": "vision"}) == decoder_config(GEMMA4)


def test_experts_stand_beside_the_feed_forward_of_every_layer() -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3, "moe_intermediate_size": 16}
    config = decoder_config({**GEMMA4, **experts})
    feeds = [kind.feed_forward for kind in config.layers]
    assert all(isinstance(feed, BesideExperts) for feed in feeds)
    assert [feed.width for feed in feeds if isinstance(feed, BesideExperts)] == [20, 20, 20, 40, 40]
    assert config.feed_width == 3 * 2 * 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', which is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which is not supported"),
        ({"vocab_size_per_layer_input": 12}, "vocab_size_per_layer_input is 12, which is not supported"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3: in front of these no layer of a type keeps KV"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9: in front of these no layer of a type keeps KV"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types has 4 entries for 5 layers"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping must be a number above 0, got 0"),
        ({"per_layer_config": {"1": {"scale": 2}}}, "per_layer_config.1.scale is not supported"),
        ({"rope_parameters": ROPE}, "rope_parameters.rope_type is not supported; known here are full_attention"),
        (
            {"rope_parameters": {"full_attention": {**ROPE, "partial_rotary_factor": 1.5}}},
            "rope_parameters.full_attention.partial_rotary_factor must be at most 1, got 1.5",
        ),
        ({"enable_moe_block": True}, "num_experts is missing"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: Config, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        decoder_config({**GEMMA4, **changes})
    assert str(refusal.value).startswith(f"config.json: {said}")


def test_of_a_share_of_pairs_the_rest_stays_and_those_that_rotate_do_so_as_if_all_did() -> None:
    cpu = torch.device("cpu")
    every = frequencies(Rope(theta=50.0), 16, cpu)
    assert torch.equal(frequencies(Rope(theta=50.0, pairs_share=0.4), 16, cpu)[:3], every[:3])
    assert not frequencies(Rope(theta=50.0, pairs_share=0.4), 16, cpu)[3:].any()


def test_layers_that_share_keep_no_kv() -> None:
    small = KvShape(window=8, num_kv_heads=2, head_dim=4, scale=1.0, dtype=torch.bfloat16)
    large = KvShape(num_kv_heads=1, head_dim=8, scale=1.0, dtype=torch.bfloat16)
    assert kv_shapes(decoder_config(GEMMA4), torch.bfloat16) == (small, small, large)
    model = tiny("gemma4").model()
    assert len(model.kv) == 4 and model.num_layers == 7
    assert token_bytes(model, None, "auto") == (2 * 2 * 16 * 4, 3 * 2 * 3 * 8 * 4)
