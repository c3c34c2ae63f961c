"""What is wrong with a GGUF file is said in words, and never with a traceback of the library that reads it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from roost.errors import ConfigError
from roost.weights.load import load_model, open_source
from tests.support.gguf_files import FIELDS, HIDDEN, Fields, Reals, write, zeros
from tests.support.small_vocabularies import byte_fields

CPU = torch.device("cpu")


def load(path: Path) -> None:
    """Everything that a start reads of a file."""
    source = open_source(path)
    source.language()
    load_model(source, weights="fp32", device=CPU)


def refusal(path: Path) -> str:
    """What a load is refused with, the file's own name cut out."""
    with pytest.raises(ConfigError) as error:
        load(path)
    return str(error.value).replace(str(path), "the file")


def without(*keys: str) -> Fields:
    return {key: value for key, value in FIELDS.items() if key not in keys}


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    load(write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a wheel", b"version https://git-lfs.github.com/spec/v1"])
def test_a_file_that_is_no_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    assert refusal(tmp_path / "m.gguf") == "the file is not a GGUF file: it does not begin with GGUF"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"--model: .*m.bin is neither a folder nor a .gguf file"):
        open_source(tmp_path / "m.bin")


@pytest.mark.parametrize("share", [4, 5, 8, 20, 24, 30, 100, 1000, 0.05, 0.1, 0.2, 0.3, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused_wherever_it_was_cut(share: float, tmp_path: Path) -> None:
    content = write(tmp_path / "whole.gguf").read_bytes()
    length = share if isinstance(share, int) else int(len(content) * share)
    (tmp_path / "m.gguf").write_bytes(content[:length])
    said = refusal(tmp_path / "m.gguf")
    assert said.startswith("the file is truncated or damaged") and str(length) in said


def test_a_file_whose_numbers_are_noise_is_refused(tmp_path: Path) -> None:
    content = bytearray(write(tmp_path / "whole.gguf").read_bytes())
    random = np.random.default_rng(1)
    for number in range(60):  # counts, types and lengths in the header
        damaged = content.copy()
        at = int(random.integers(4, 400))
        damaged[at : at + 8] = random.bytes(8)
        (tmp_path / f"{number}.gguf").write_bytes(damaged)
        try:
            load(tmp_path / f"{number}.gguf")
        except ConfigError as error:
            assert str(error)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", architecture="mamba")
    known = "llama, qwen2, qwen3, qwen3moe, gemma3"
    assert refusal(path) == f"the file is of architecture mamba, which is not known; known are {known}"


@pytest.mark.parametrize(
    "key",
    [
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.block_count",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.model",
        "tokenizer.ggml.merges",
    ],
)
def test_a_key_that_is_missing_is_named(key: str, tmp_path: Path) -> None:
    assert key in refusal(write(tmp_path / "m.gguf", fields=without(key)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"llama.attention.head_count": 0}, "head_count must be a number"),
        ({"llama.attention.head_count": 3}, "21"),
        ({"llama.attention.head_count_kv": 3}, "heads do not share 3 KV heads evenly"),
        ({"llama.block_count": 0}, "num_hidden_layers must be a whole number of at least 1"),
        ({"llama.block_count": 3}, "no tensor model.layers.2.self_attn.q_proj.weight"),
        ({"llama.block_count": 1}, "tensors that this model does not use: model.layers.1."),
        ({"llama.embedding_length": "64"}, "llama.attention.head_count"),
        ({"llama.feed_forward_length": 95}, "gate_proj.weight is [96, 64], its config says [95, 64]"),
        ({"llama.rope.dimension_count": 8}, "heads of 16 of which only 8 dimensions are rotated are not supported"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling yarn is not known; known are none and linear"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling longrope is not known"),
        ({"llama.rope.scaling.type": "linear"}, "its metadata has no llama.rope.scaling.factor"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
            "rope.scaling.factor must be a number above 0",
        ),
        ({"llama.rope.freq_base": -1.0}, "rope_theta must be a number above 0"),
        (byte_fields("deepseek-llm"), "tokenizer.ggml.pre: 'deepseek-llm' is not known"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model: 'bert' is not known"),
        ({"tokenizer.ggml.eos_token_id": 99999}, "eos_token_id 99999 is outside"),
        ({"tokenizer.chat_template": "{% for %}"}, "chat template: does not compile"),
    ],
)
def test_metadata_that_cannot_be_served_says_why(changes: Fields, said: str, tmp_path: Path) -> None:
    assert said in refusal(write(tmp_path / "m.gguf", fields=FIELDS | changes))


def changed(name: str, tensor: Reals) -> dict[str, Reals]:
    return zeros() | {name: tensor}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (changed("blk.0.attn_q_norm.weight", np.zeros(16, np.float32)), "a tensor blk.0.attn_q_norm.weight that no"),
        (changed("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32)), "a tensor blk.0.ffn_gate_exps.weight"),
        (changed("mystery", np.zeros(4, np.float32)), "a tensor mystery that no"),
        (changed("blk.0.attn_q.bias", np.zeros(HIDDEN, np.float32)), "self_attn.q_proj.bias"),
        (changed("blk.0.attn_q.weight", np.zeros(64, np.float32)), "q_proj.weight"),
        (changed("blk.0.attn_k.weight", np.zeros((24, 64), np.float32)), "is [24, 64], not rows in multiples of 16"),
        (changed("blk.9.attn_k.weight", np.zeros((32, 64), np.float32)), "model.layers.9.self_attn.k_proj.weight"),
        (changed("rope_freqs.weight", np.ones(5, np.float32)), "rope_freqs.weight is 5 long, not 8"),
        (changed("rope_freqs.weight", np.zeros(8, np.float32)), "must be a number above 0"),
        ({name: tensor for name, tensor in zeros().items() if name != "output_norm.weight"}, "model.norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors: dict[str, Reals], said: str, tmp_path: Path) -> None:
    assert said in refusal(write(tmp_path / "m.gguf", tensors=tensors))


def test_a_file_without_a_head_uses_its_embedding(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in zeros().items() if name != "output.weight"}
    source = open_source(write(tmp_path / "m.gguf", tensors=tensors))
    assert source.config()["tie_word_embeddings"] is True
    load_model(source, weights="fp32", device=CPU)


def test_a_tensor_of_a_type_that_cannot_be_dequantised_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write(tmp_path / "m.gguf", kind=Kind.Q8_0))

    def cannot(data: Reals, kind: Kind) -> Reals:
        raise NotImplementedError(kind)

    monkeypatch.setattr("gguf.quants.dequantize", cannot)
    with pytest.raises(ConfigError, match=r"token_embd.weight is of type Q8_0, which cannot be dequantised"):
        load_model(source, weights="fp32", device=CPU)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    tensors = zeros()
    path = write(tmp_path / "m.gguf", tensors=tensors)
    content = bytearray(path.read_bytes())
    at = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8  # past dimensions and length
    assert content[at : at + 4] == bytes([Kind.F32, 0, 0, 0])
    content[at] = Kind.I32
    path.write_bytes(content)
    assert "output_norm.weight is of type I32, which cannot be dequantised" in refusal(path)
