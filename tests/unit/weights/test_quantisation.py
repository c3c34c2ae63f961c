"""What a config.json says of quantisation: published forms are read, what is not supported is refused by its name."""

import pytest

from roost.errors import ConfigError
from roost.weights.quantisation import Quantisation, read_quantisation
from roost.weights.quantised_folder import PACKINGS
from tests.support.config_files import LLAMA, Config
from tests.support.fp8_folders import DYNAMIC, FLOAT8, FORMATS, STATIC, compressed

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
AWQ: Config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ: Config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def read(config: Config, key: str = "quantization_config") -> Quantisation:
    found = read_quantisation({**LLAMA, key: config})
    assert found is not None
    return found


def test_a_checkpoint_that_says_nothing_is_not_quantised() -> None:
    assert read_quantisation(LLAMA) is None
    assert read_quantisation({**LLAMA, "quantization_config": None, "compression_config": {}}) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
            Quantisation(
                form="fp8",
                packing="fp8",
                strategy="block",
                block=(128, 128),
                activations="dynamic",
                ignored=("lm_head",),
            ),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            Quantisation(form="fp8", packing="fp8", strategy="tensor", activations="static"),
        ),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
            Quantisation(
                form="fp8", packing="fbgemm_fp8", strategy="channel", activations="dynamic", ignored=("lm_head",)
            ),
        ),
        (
            compressed({**FLOAT8, "strategy": "tensor"}, STATIC, kv_cache_scheme=STATIC),
            Quantisation(
                form="fp8",
                packing="compressed-tensors",
                strategy="tensor",
                activations="static",
                ignored=("lm_head",),
                kv_scales=True,
            ),
        ),
        (
            compressed(INT4, None, format="pack-quantized"),
            Quantisation(
                form="int4",
                packing="compressed-tensors",
                strategy="group",
                group_size=128,
                ignored=("lm_head",),
            ),
        ),
        (AWQ, Quantisation(form="int4", packing="awq", strategy="group", group_size=128, has_zeros=True)),
        (GPTQ, Quantisation(form="int4", packing="gptq", strategy="group", group_size=128)),
        (
            {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False, "group_size": -1},
            Quantisation(form="int4", packing="gptq_v2", strategy="group", has_zeros=True),
        ),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
            Quantisation(
                form="mxfp4",
                packing="mxfp4",
                strategy="group",
                group_size=32,
                ignored=("model.layers.*.self_attn", "lm_head"),
            ),
        ),
    ],
)
def test_published_configs_are_read(config: Config, expected: Quantisation) -> None:
    assert read(config) == expected


def test_the_older_key_of_compressed_tensors_needs_no_method() -> None:
    config = compressed({**FLOAT8, "strategy": "channel"}, DYNAMIC)
    assert read({key: value for key, value in config.items() if key != "quant_method"}, "compression_config") == read(
        config
    )


KNOWN = "known are fp8, fbgemm_fp8, compressed-tensors, awq, gptq"
_SPARSE = {"format": "sparse-24-bitmask"}
REFUSED: list[tuple[Config, str]] = [
    *(
        ({"quant_method": method, "bits": 4}, f"quant_method is '{method}', which is not supported; {KNOWN}")
        for method in ("bitsandbytes", "hqq", "aqlm", "quark", "torchao", "modelopt", "quanto", "marlin")
    ),
    ({"bits": 4}, "quant_method is missing"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', which is not supported; known are e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two numbers"),
    ({**GPTQ, "bits": 8}, "bits is 8; 4 is supported"),
    ({**AWQ, "bits": 3}, "bits is 3; 4 is supported"),
    ({**AWQ, "version": "gemv"}, "version is 'gemv', which is not supported; known are gemm"),
    ({**GPTQ, "desc_act": True}, "desc_act is true: inputs ordered by activation are not supported; false is"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', which is not supported; known are gptq"),
    ({**GPTQ, "dynamic": {"-:lm_head": {}}}, "dynamic is {'-:lm_head': {}}, which is not supported"),
    (
        compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, None, format="int-quantized"),
        "format is 'int-quantized', which is not supported; known are float-quantized",
    ),
    (
        compressed({"num_bits": 4, "type": "float", "strategy": "tensor_group"}, None, format="nvfp4-pack-quantized"),
        "format is 'nvfp4-pack-quantized', which is not supported",
    ),
    (
        compressed({"num_bits": 8, "type": "int", "strategy": "group"}, None, format="pack-quantized"),
        "config_groups.group_0.weights.num_bits and type are 8 and int; supported are 8 and float, 4 and int",
    ),
    (compressed(INT4, None), "format is float-quantized for 4-bit int weights, which is not supported"),
    (
        compressed({**INT4, "actorder": "group"}, None, format="pack-quantized"),
        "config_groups.group_0.weights.actorder is 'group', which is not supported",
    ),
    (compressed(INT4, DYNAMIC, format="pack-quantized"), "config_groups.group_0.input_activations must be 8-bit"),
    (compressed(FLOAT8, DYNAMIC, config_groups={}), "config_groups has 0 schemes"),
    (compressed(FLOAT8, DYNAMIC, sparsity_config=_SPARSE), "sparsity_config.format is 'sparse-24-bitmask', which is"),
    (compressed(FLOAT8, DYNAMIC, transform_config={"a": 1}), "transform_config is {'a': 1}, which is not supported"),
    (compressed(FLOAT8, DYNAMIC, quantization_status="frozen"), "quantization_status is 'frozen', which is not"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_what_is_not_supported_is_refused_by_name_with_what_is(config: Config, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(config)
    assert str(refusal.value).startswith(f"config.json: quantization_config.{said}")


def test_two_accounts_of_the_same_are_refused() -> None:
    with pytest.raises(ConfigError, match="quantization_config and compression_config are both there"):
        read_quantisation({**LLAMA, "quantization_config": AWQ, "compression_config": AWQ})


@pytest.mark.parametrize(
    ("entry", "meant", "not_meant"),
    [
        ("lm_head", "lm_head", "model.lm_head_norm"),
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.up_proj"),
        ("o_proj", "model.layers.3.self_attn.o_proj", "model.layers.3.self_attn.no_proj"),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.k_proj", "model.layers.7.mlp.up_proj"),
        ("re:.*lm_head", "model.lm_head", "model.layers.0.mlp.up_proj"),
        (r"re:model\.layers\.[02]\.mlp", "model.layers.2.mlp.up_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_a_list_of_modules_means_names_parents_ends_and_patterns(entry: str, meant: str, not_meant: str) -> None:
    quantisation = read({"quant_method": "fp8", "modules_to_not_convert": [entry]})
    assert quantisation.ignores(meant) and not quantisation.covers(meant)
    assert not quantisation.ignores(not_meant) and quantisation.covers(not_meant)


def test_targets_may_be_patterns_too() -> None:
    config = compressed({**FLOAT8, "strategy": "channel"}, DYNAMIC)
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]  # type: ignore[index]
    quantisation = read(config)
    assert quantisation.covers("model.layers.0.mlp.up_proj")
    assert not quantisation.covers("model.layers.0.self_attn.q_proj")


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'re:\(' is not a regular expression"):
        read({"quant_method": "fp8", "ignored_layers": ["re:("]}).ignores("lm_head")


def test_every_format_that_is_tested_has_a_packing() -> None:
    assert {(read(each.config).form, read(each.config).packing) for each in FORMATS.values()} <= set(PACKINGS)
