"""A head's config.json: what it means, and what it may leave out."""

from roost.models.eagle import read_eagle, read_eagle3
from roost.models.fields import Fields
from tests.support.config_files import LLAMA, LLAMA3_SCALING, Config

ONE: Config = {**LLAMA, "num_hidden_layers": 1}


def test_a_head_has_the_vocabulary_and_the_hidden_size_of_its_target_unless_it_says_otherwise() -> None:
    for read in (read_eagle, read_eagle3):
        config = read(Fields(ONE))
        assert (config.num_tokens, config.target_hidden_size) == (11, 12)
        assert (config.layer_ids, config.norm_before_residual) == ((), False)
    changed = {"draft_vocab_size": 5, "target_hidden_size": 16, "norm_before_residual": True}
    config = read_eagle3(Fields({**ONE, **changed}))
    assert (config.num_tokens, config.target_hidden_size, config.norm_before_residual) == (5, 16, True)


def test_sizes_and_rope_are_read_as_llamas_are() -> None:
    layers = read_eagle(Fields({**LLAMA, "rope_scaling": LLAMA3_SCALING, "attention_bias": True})).layers
    assert len(layers.layers) == 3
    assert layers.layers[0].rope.factor == 8.0
    assert layers.qkv_bias and layers.out_bias


def test_layer_ids_may_be_at_either_place_or_at_both_and_the_same() -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 14, 0]}
    for changes in (ids, {"eagle_config": ids}, {**ids, "eagle_config": ids}):
        assert read_eagle3(Fields({**ONE, **changes})).layer_ids == (1, 14, 0)


def test_options_that_change_nothing_are_accepted() -> None:
    neutral = {"logit_scale": 1.0, "add_para_norm": False, "eagle_config": {"use_aux_hidden_state": True}, "bias": True}
    assert read_eagle3(Fields({**ONE, **neutral})) == read_eagle3(Fields(ONE))
