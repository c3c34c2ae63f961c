"""Tiny random checkpoints with FP8 weights, in every form in which such are published, and the floats they stand for.

Values and scales are drawn, not rounded from anything: the floats are their products, computed in the plainest way.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from roost.models.registry import decoder_config
from roost.weights.folder import CONFIG, SINGLE_FILE
from tests.support.config_files import LLAMA, Config, llama_tensors

BLOCK = (16, 32)  # outputs and inputs: two heads of keys end inside of a block, the last block of inputs is cut
SIZES: Config = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def compressed(weights: Config, inputs: Config | None, **more: object) -> Config:
    """A quantization_config of compressed-tensors."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **more,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to publish FP8 weights."""

    config: Config  # its quantization_config
    shared_by: str  # what shares a scale: tensor, channel, block
    scale_name: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    extra: tuple[str, ...] = ()  # scalars beside each projection that nothing is computed with
    left_out: str = ""  # in the names of those projections that its config leaves in floats


FORMATS = {
    "deepseek": Format(  # and Qwen's: blocks, activations by group
        config={
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
        },
        shared_by="block",
        scale_name="weight_scale_inv",
    ),
    "autofp8": Format(
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        shared_by="tensor",
        extra=("input_scale",),
    ),
    "fbgemm": Format(
        config={
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn"],
        },
        shared_by="channel",
        extra=("input_scale_ub",),
        left_out="layers.1.self_attn",
    ),
    "compressed": Format(
        config=compressed({**FLOAT8, "strategy": "channel"}, DYNAMIC),
        shared_by="channel",
        scale_dtype=torch.bfloat16,
    ),
    "compressed-tensor": Format(
        config=compressed({**FLOAT8, "strategy": "tensor"}, STATIC, kv_cache_scheme=STATIC),
        shared_by="tensor",
        extra=("input_scale", "output_scale"),
    ),
    "compressed-block": Format(
        config=compressed({**FLOAT8, "strategy": "block", "block_structure": list(BLOCK)}, DYNAMIC),
        shared_by="block",
    ),
    "compressed-weights-alone": Format(
        config=compressed({**FLOAT8, "strategy": "channel"}, None, ignore=["re:.*lm_head", "re:.*layers.0.mlp.*"]),
        shared_by="channel",
        left_out="layers.0.mlp",
    ),
}


def is_plain(name: str, layout: Format) -> bool:
    """Whether a tensor is in floats: no matrix of a layer, or listed in the format's config."""
    return not name.endswith("_proj.weight") or (layout.left_out != "" and layout.left_out in name)


def write_fp8(folder: Path, layout: Format, *, seed: int = 0, sizes: Config = SIZES) -> dict[str, Tensor]:
    """Write a checkpoint; returns its tensors in floats, by the names of a plain one."""
    drawn = torch.Generator().manual_seed(seed)
    config = {**LLAMA, **sizes}
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, zero in llama_tensors(decoder_config(config)).items():
        if is_plain(name, layout):
            floats[name] = torch.randn(zero.shape, generator=drawn) * 0.3
            stored[name] = floats[name]
            continue
        values = torch.randn(zero.shape, generator=drawn).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
        scales = (torch.rand(scale_shape(zero, layout), generator=drawn) + 0.5) * 0.003
        scales = scales.to(layout.scale_dtype)
        floats[name] = values.float() * spread(scales.float(), zero, layout)
        module = name.removesuffix(".weight")
        stored[name], stored[f"{module}.{layout.scale_name}"] = values, scales
        stored |= {f"{module}.{extra}": torch.rand(1, generator=drawn) for extra in layout.extra}
    save_file(stored, folder / SINGLE_FILE)
    (folder / CONFIG).write_text(json.dumps({**config, "quantization_config": layout.config}))
    return floats


def scale_shape(weight: Tensor, layout: Format) -> tuple[int, ...]:
    """How a format stores the scales of a matrix."""
    if layout.shared_by == "block":
        return -(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1])
    return (1,) if layout.shared_by == "tensor" else (weight.shape[0], 1)


def spread(scales: Tensor, weight: Tensor, layout: Format) -> Tensor:
    """The scale of each number of a matrix."""
    if layout.shared_by != "block":
        return scales
    row, column = torch.arange(weight.shape[0])[:, None], torch.arange(weight.shape[1])[None, :]
    return scales[row // BLOCK[0], column // BLOCK[1]]
