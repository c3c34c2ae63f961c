"""A tiny random model, as a Hugging Face folder: what the self-test runs where no model has been downloaded.

Its weights follow from a fixed seed and its vocabulary is single bytes, so nothing needs to be fetched. What it writes
means nothing. Called by the checks of `roost doctor`.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

_END = "<|end|>"
_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144)]  # the characters that stand for single bytes
_HIDDEN, _WIDE, _LAYERS, _HEADS, _KV_HEADS = 64, 128, 2, 4, 2
_VOCABULARY = [_END, *map(chr, _BYTES)]


def write_random_model(folder: Path) -> None:
    """Write the model's files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(_VOCABULARY),
        "hidden_size": _HIDDEN,
        "intermediate_size": _WIDE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HIDDEN // _HEADS,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END, "add_bos_token": False}))
    drawn = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=drawn) * shape[-1] ** -0.5 for name, shape in _shapes().items()}
    save_file(tensors, folder / "model.safetensors")


def _shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors, by name."""
    kv = _HIDDEN * _KV_HEADS // _HEADS
    outer = {"model.embed_tokens.weight": (len(_VOCABULARY), _HIDDEN), "lm_head.weight": (len(_VOCABULARY), _HIDDEN)}
    shapes: dict[str, tuple[int, ...]] = {**outer, "model.norm.weight": (_HIDDEN,)}
    for number in range(_LAYERS):
        prefix = f"model.layers.{number}."
        for name, size in {"q": _HIDDEN, "k": kv, "v": kv, "o": _HIDDEN}.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, _HIDDEN)
        for name, shape in {"gate": (_WIDE, _HIDDEN), "up": (_WIDE, _HIDDEN), "down": (_HIDDEN, _WIDE)}.items():
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
        for name in ("input", "post_attention"):
            shapes[f"{prefix}{name}_layernorm.weight"] = (_HIDDEN,)
    return shapes


def _tokenizer() -> dict[str, object]:
    """The contents of tokenizer.json."""
    end = {"id": 0, "content": _END, "special": True, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {text: number for number, text in enumerate(_VOCABULARY)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
