"""A GGUF file gives the logits of a transformers model that has the same weights, dequantised, and the same rope."""

from math import pi
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig, LlamaForCausalLM

from roost.text.tokenizer import Tokenizer
from roost.weights.load import load_model, open_source
from tests.support.gguf_files import (
    FIELDS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    WIDE,
    Fields,
    Reals,
    shapes,
    write,
)
from tests.support.tiny_models import CPU, LLAMA3_ROPE
from tests.support.workload import logits_in_one_pass

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 700.0}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hub_name(name: str) -> str:
    """What transformers calls a tensor."""
    base = name.removesuffix(".weight")
    if base in NAMES:
        return f"{NAMES[base]}.weight"
    _, number, part = base.split(".")
    return f"model.layers.{number}.{BLOCK_NAMES[part]}.weight"


def paired(weight: Reals) -> Reals:
    """Rows of each head as the format has them: dimensions that turn together lie side by side."""
    heads = weight.reshape(-1, 2, HEAD_DIM // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(weight.shape))


def weights(*, tied: bool = False) -> dict[str, Reals]:
    """Random tensors in transformers' order, by the format's names."""
    random = np.random.default_rng(5)
    tensors = {}
    for name, shape in shapes().items():
        low, high = (0.5, 1.5) if "norm" in name else (-0.5, 0.5)
        tensors[name] = random.uniform(low, high, shape).astype(np.float32)
    if tied:
        del tensors["output.weight"]
    return tensors


def in_file(tensors: dict[str, Reals]) -> dict[str, Reals]:
    """The tensors as a file has them."""
    return {name: paired(each) if ".attn_q." in name or ".attn_k." in name else each for name, each in tensors.items()}


def reference(tensors: dict[str, Reals], kind: Kind, rope: dict[str, object]) -> LlamaForCausalLM:
    """transformers' model with those weights, after they went through `kind`."""
    tied = "output.weight" not in tensors
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        rms_norm_eps=0.01,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    rounded = {hub_name(name): torch.from_numpy(through(each, kind)) for name, each in tensors.items()}
    missing = model.load_state_dict(rounded, strict=False)
    assert missing.missing_keys == (["lm_head.weight"] if tied else []) and not missing.unexpected_keys
    model.tie_weights()
    return model.eval()


def through(tensor: Reals, kind: Kind) -> Reals:
    """A tensor after it was kept in a form; a block never leaves its row, so the order of rows does not matter."""
    if tensor.ndim == 1 or kind is Kind.F32:
        return tensor
    if kind is Kind.F16:
        return tensor.astype(np.float16).astype(np.float32)
    return np.ascontiguousarray(gguf.quants.dequantize(gguf.quants.quantize(tensor, kind), kind))


def assert_same_logits(path: Path, theirs: LlamaForCausalLM) -> None:
    model = load_model(open_source(path), weights="fp32", device=CPU)
    prompt = tuple(np.random.default_rng(6).integers(0, VOCAB, 120).tolist())
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits_in_one_pass(model, prompt), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_a_file_of_every_kind_gives_the_logits_of_its_dequantised_weights(kind: Kind, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors=in_file(weights()), kind=kind)
    assert_same_logits(path, reference(weights(), kind, PLAIN_ROPE))


def test_a_file_without_a_head_gives_the_logits_of_a_tied_model(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors=in_file(weights(tied=True)))
    assert_same_logits(path, reference(weights(tied=True), Kind.F32, PLAIN_ROPE))


@pytest.mark.parametrize(
    "said",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_a_rope_scaled_linearly_turns_that_much_slower(said: Fields, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors=in_file(weights()), fields=FIELDS | said)
    rope = {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0}
    assert_same_logits(path, reference(weights(), Kind.F32, rope))


def llama3_factors() -> Reals:
    """What a converter writes for Llama 3's rope: a divisor of each frequency."""
    factor, low, high, original = (
        float(LLAMA3_ROPE[name])  # type: ignore[arg-type]
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    factors = []
    for i in range(0, HEAD_DIM, 2):
        length = 2 * pi * 700.0 ** (i / HEAD_DIM)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    assert len(set(factors)) > 2, "all three bands must be tried"
    return np.array(factors, dtype=np.float32)


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    tensors = in_file(weights()) | {"rope_freqs.weight": llama3_factors()}
    path = write(tmp_path / "m.gguf", tensors=tensors)
    assert_same_logits(path, reference(weights(), Kind.F32, LLAMA3_ROPE))


def test_a_file_that_states_none_of_what_may_be_left_out_is_read_as_llama_cpp_reads_it(tmp_path: Path) -> None:
    left_out = ("llama.rope.freq_base", "llama.rope.dimension_count")
    fields = {key: value for key, value in FIELDS.items() if key not in left_out}
    path = write(tmp_path / "m.gguf", tensors=in_file(weights()), fields=fields)
    assert_same_logits(path, reference(weights(), Kind.F32, {"rope_type": "default", "rope_theta": 10000.0}))


def test_a_files_tokenizer_is_the_one_its_metadata_describes(tmp_path: Path) -> None:
    language = open_source(write(tmp_path / "m.gguf", fields=FIELDS | {"tokenizer.chat_template": "x"})).language()
    assert isinstance(language.tokenizer, Tokenizer) and language.tokenizer.vocab_size == VOCAB
    assert (
        language.tokenizer.decode(language.tokenizer.encode("hell 12 日", special=False), skip_special=True)
        == "hell 12 日"
    )
    assert language.template is not None


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_blocks_are_the_floats_they_stand_for_with_their_rows_in_order(kind: Kind, tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "m.gguf", tensors=in_file(weights()), kind=kind))
    for name, tensor in weights().items():
        kept = source.quantised(hub_name(name), CPU)
        assert (kept is None) == (tensor.ndim == 1)
        if kept is not None:
            assert torch.equal(kept.dequantise(), torch.from_numpy(through(tensor, kind))), name


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16])
def test_kept_as_blocks_a_file_gives_nearly_the_same_logits(kind: Kind, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tensors=in_file(weights()), kind=kind)
    prompt = tuple(np.random.default_rng(6).integers(0, VOCAB, 9).tolist())
    ours, theirs = (
        logits_in_one_pass(load_model(open_source(path), weights=form, device=CPU), prompt).float()
        for form in ("gguf", "fp32")
    )
    assert (ours - theirs).norm() / theirs.norm() < 0.06  # tokens are rounded to int8
