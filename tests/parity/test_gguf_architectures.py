"""GGUF files of every architecture give the logits of transformers' model with the same weights, as they are stored."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from roost.errors import ConfigError
from roost.layers.experts import Experts, Routed
from roost.layers.ops import TORCH_OPS
from roost.weights.gguf_architectures import ARCHITECTURES
from roost.weights.load import load_model, open_source
from tests.support.gguf_files import VOCAB, Fields, Reals, write
from tests.support.small_vocabularies import byte_fields
from tests.support.tiny_models import CPU, KINDS, SHAPE, WINDOW, randomised
from tests.support.workload import logits_in_one_pass

NUM_EXPERTS = 4
EXPERTS = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GEMMA = {
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "num_hidden_layers": 7,
}
# architecture -> the kind of tiny checkpoint, and what its config has
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"head_dim": 16}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3moe": ("qwen3-moe", EXPERTS),
    "gemma3": ("gemma3", GEMMA),
}


def model_of(architecture: str) -> PreTrainedModel:
    """A random checkpoint whose rows are whole blocks."""
    kind, special = MODELS[architecture]
    made, config, _ = KINDS[kind]
    torch.manual_seed(11)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 16}
    model = made(config(**{**SHAPE, **sizes, "initializer_range": 0.2, **special}))
    return randomised(model, least_norm=-0.5 if architecture == "gemma3" else 0.5)


def in_file(architecture: str, model: PreTrainedModel) -> dict[str, Reals]:
    """Its tensors as a converter stores them."""
    own, found = ARCHITECTURES[architecture], dict[str, Reals]()
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {theirs: ours for ours, theirs in own.names.items()}
    for name, weight in model.state_dict().items():
        values = weight.numpy() + (own.norm_offset if name.endswith("norm.weight") else 0.0)
        layer = re.match(r"model\.layers\.(\d+)\.(.+?)(?:\.(weight|bias))?$", name)
        if layer is None:
            base, _, kind = name.rpartition(".")
            if not (base == "lm_head" and model.config.tie_word_embeddings):
                found[f"{whole[base]}.{kind}"] = values
            continue
        number, part, kind = layer.groups()
        if part == "mlp.experts.gate_up_proj":
            gate, up = np.split(values, 2, axis=1)
            found |= {f"blk.{number}.ffn_gate_exps.weight": gate, f"blk.{number}.ffn_up_exps.weight": up}
        elif part == "mlp.experts.down_proj":
            found[f"blk.{number}.ffn_down_exps.weight"] = values
        elif part == "mlp.gate":
            found[f"blk.{number}.ffn_gate_inp.weight"] = values
        else:
            found[f"blk.{number}.{parts[part]}.{kind}"] = values
    return {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in found.items()}


def fields_of(architecture: str, model: PreTrainedModel) -> Fields:
    """What its file says."""
    config = model.config
    said: Fields = {
        "context_length": 2048,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 700.0,
    }
    if architecture == "qwen3moe":
        said |= {"expert_count": NUM_EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32}
    if architecture == "gemma3":
        said |= {"attention.sliding_window": WINDOW, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    return {**{f"{architecture}.{key}": value for key, value in said.items()}, **byte_fields()}


def stored(model: PreTrainedModel, kind: Kind) -> PreTrainedModel:
    """The same with its matrices as they are after they were kept in a form."""
    if kind is not Kind.F32:
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                blocks = gguf.quants.quantize(weight.detach().numpy(), kind)
                weight.data = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
                assert weight.ndim < 3 or "experts" in name
    return model


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_gives_the_logits_of_its_weights(architecture: str, kind: Kind, tmp_path: Path) -> None:
    model = model_of(architecture)
    path = write(
        tmp_path / "m.gguf",
        fields=fields_of(architecture, model),
        tensors=in_file(architecture, model),
        kind=kind,
        architecture=architecture,
    )
    prompt = tuple(np.random.default_rng(6).integers(0, VOCAB, 60).tolist())
    with torch.no_grad():
        wanted = stored(model, kind)(torch.tensor([prompt])).logits[0]
    found = logits_in_one_pass(load_model(open_source(path), weights="fp32", device=CPU), prompt)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    if kind is not Kind.F32:  # kept as they are stored, where tokens are rounded as well
        blocks = logits_in_one_pass(load_model(open_source(path), weights="gguf", device=CPU), prompt)
        assert (blocks - wanted).norm() / wanted.norm() < 0.15


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_matrices_of_k_quants_are_read_as_the_floats_they_stand_for(kind: Kind, tmp_path: Path) -> None:
    model = model_of("qwen3")
    tensors, name = in_file("qwen3", model), "blk.1.ffn_down.weight"
    _, num_bytes = gguf.constants.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(4).integers(0, 256, (64, num_bytes), dtype=np.uint8)
    floats = gguf.quants.dequantize(blocks, kind)
    for row in range(64):  # bytes of a scale may be any float: those that are none are drawn again
        while not np.isfinite(floats[row]).all() or np.abs(floats[row]).max() > 1e3:
            blocks[row] = np.random.default_rng(int(blocks[row].sum()) + row).integers(0, 256, num_bytes)
            floats[row] = gguf.quants.dequantize(blocks[row : row + 1], kind)[0]
    path = write(
        tmp_path / "m.gguf",
        fields=fields_of("qwen3", model),
        tensors=tensors,
        stored={name: (blocks, kind)},
        architecture="qwen3",
    )
    source = open_source(path)
    assert torch.equal(source["model.layers.1.mlp.down_proj.weight"], torch.from_numpy(floats))
    load_model(source, weights="int8", device=CPU)


def test_quantised_experts_stand_side_by_side_as_floats_where_a_backend_wants_them_so(tmp_path: Path) -> None:
    def mix(normed: torch.Tensor, routed: Routed, experts: Experts) -> torch.Tensor:
        assert experts.stacked is not None
        return TORCH_OPS.mix_experts(normed, routed, experts)

    model, ops = model_of("qwen3moe"), replace(TORCH_OPS, mix_experts=mix)
    path = write(
        tmp_path / "m.gguf",
        fields=fields_of("qwen3moe", model),
        tensors=in_file("qwen3moe", model),
        kind=Kind.Q8_0,
        architecture="qwen3moe",
    )
    prompt = (5, 9, 30, 7)
    found, wanted = (
        logits_in_one_pass(load_model(open_source(path), weights="fp32", device=CPU, ops=each), prompt)
        for each in (ops, TORCH_OPS)
    )
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ConfigError, match="--weights gguf: this backend runs a mixture of experts in fp32 or bf16"):
        load_model(open_source(path), weights="gguf", device=CPU, ops=ops)


def test_an_expert_that_is_missing_is_refused_by_its_name(tmp_path: Path) -> None:
    model = model_of("qwen3moe")
    tensors = in_file("qwen3moe", model)
    tensors["blk.0.ffn_up_exps.weight"] = tensors["blk.0.ffn_up_exps.weight"][:-1]
    path = write(tmp_path / "m.gguf", fields=fields_of("qwen3moe", model), tensors=tensors, architecture="qwen3moe")
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight"):
        load_model(open_source(path), weights="fp32", device=CPU)
