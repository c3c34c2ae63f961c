"""Tiny random checkpoints with 4-bit weights, in every form in which such are published, and the floats they stand for.

Values, scales and zero points are drawn; packing follows each format's own description, word by word.
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

SIZES: Config = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each field of a word holds, lowest first
IN_ORDER = tuple(range(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to publish 4-bit weights."""

    method: str
    group: int | None  # inputs of a group; None: all
    has_zeros: bool
    version: int = 1  # of GPTQ's format

    def config(self) -> Config:
        """Its quantization_config."""
        size = -1 if self.group is None else self.group
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        if self.method == "gptq":
            named = {} if self.version == 1 else {"checkpoint_format": "gptq_v2"}
            return {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": not self.has_zeros, **named}
        weights = {"num_bits": 4, "type": "int", "symmetric": not self.has_zeros, "group_size": self.group}
        weights["strategy"] = "channel" if self.group is None else "group"
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        }


FORMATS = {
    "awq": Format(method="awq", group=128, has_zeros=True),
    "awq-32": Format(method="awq", group=32, has_zeros=True),
    "gptq": Format(method="gptq", group=64, has_zeros=True),
    "gptq-symmetric": Format(method="gptq", group=128, has_zeros=False),
    "gptq-channel": Format(method="gptq", group=None, has_zeros=True),
    "gptq-v2": Format(method="gptq", group=128, has_zeros=True, version=2),
    "compressed": Format(method="compressed", group=128, has_zeros=False),
    "compressed-zeros": Format(method="compressed", group=32, has_zeros=True),
    "compressed-channel": Format(method="compressed", group=None, has_zeros=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A matrix: w[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g], where input i belongs to group g."""

    values: Tensor  # [out, in]
    zeros: Tensor  # [out, groups]
    scales: Tensor  # [out, groups]

    def floats(self) -> Tensor:
        """The weights, each from its own group."""
        group = torch.arange(self.values.shape[1]) * self.scales.shape[1] // self.values.shape[1]
        return (self.values - self.zeros[:, group]).float() * self.scales[:, group].float()


def draw(out_len: int, in_len: int, layout: Format, drawn: torch.Generator) -> Drawn:
    """A random matrix; GPTQ's first format cannot say a zero point of 0."""
    groups = 1 if layout.group is None else in_len // layout.group
    zeros = torch.randint(1, 16, (out_len, groups), generator=drawn)
    return Drawn(
        values=torch.randint(0, 16, (out_len, in_len), generator=drawn),
        zeros=zeros if layout.has_zeros else torch.full_like(zeros, 8),
        scales=((torch.rand((out_len, groups), generator=drawn) + 0.5) * 0.02).to(torch.float16),
    )


def packed(values: Tensor, dim: int, columns: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Eight neighbours along a dimension in one int32; field f holds the one that `columns` names."""
    values = values if dim == 1 else values.t()
    words = torch.zeros((values.shape[0], values.shape[1] // 8), dtype=torch.int64)
    for field, column in enumerate(columns):
        words |= values[:, column::8] << (4 * field)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return (words if dim == 1 else words.t()).contiguous()


def stored(matrix: Drawn, layout: Format) -> dict[str, Tensor]:
    """The tensors of a projection, by the last word of their names."""
    out_len, in_len = matrix.values.shape
    if layout.method == "awq":
        return {
            "qweight": packed(matrix.values.t(), 1, AWQ_COLUMNS),
            "qzeros": packed(matrix.zeros.t(), 1, AWQ_COLUMNS),
            "scales": matrix.scales.t().contiguous(),
        }
    if layout.method == "gptq":
        return {
            "qweight": packed(matrix.values.t(), 0),
            "qzeros": packed(matrix.zeros.t() - (1 if layout.version == 1 else 0), 1),
            "scales": matrix.scales.t().contiguous(),
            "g_idx": (torch.arange(in_len) // (layout.group or in_len)).to(torch.int32),
            "bias": torch.zeros(out_len, dtype=torch.float16),  # as AutoGPTQ writes one for every projection
        }
    tensors = {
        "weight_packed": packed(matrix.values, 1),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor([out_len, in_len]),
    }
    return {**tensors, "weight_zero_point": packed(matrix.zeros, 0)} if layout.has_zeros else tensors


def write_int4(folder: Path, layout: Format, *, seed: int = 0) -> dict[str, Tensor]:
    """Write a checkpoint; returns its tensors in floats, by the names of a plain one."""
    drawn = torch.Generator().manual_seed(seed)
    config = {**LLAMA, **SIZES}
    kept: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, zero in llama_tensors(decoder_config(config)).items():
        if name.endswith("_proj.weight"):
            matrix = draw(*zero.shape, layout, drawn)
            floats[name] = matrix.floats()
            kept |= {name.replace("weight", part): tensor for part, tensor in stored(matrix, layout).items()}
        else:
            kept[name] = floats[name] = torch.randn(zero.shape, generator=drawn) * 0.3
    save_file(kept, folder / SINGLE_FILE)
    (folder / CONFIG).write_text(json.dumps({**config, "quantization_config": layout.config()}))
    return floats
