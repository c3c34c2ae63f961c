"""A tiny random model in a Hugging Face folder: it loads at once, and its server may be told to die."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from roost.models.registry import decoder_config
from roost.weights.folder import CONFIG, SETTINGS, SINGLE_FILE, TEMPLATE
from tests.support.config_files import LLAMA, llama_tensors
from tests.support.small_vocabularies import byte_level

CONTEXT = 8192
PLAIN_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# What it makes its client wait for: endless, but for a limit that the test sets.
ENDLESS = {"max_new_tokens": 8000, "ignore_eos": True, "temperature": 0}


def write_model(folder: Path, template: str = PLAIN_TEMPLATE, *, seed: int = 0) -> Path:
    """Write the model's files."""
    tokenizer = byte_level()
    config = {**LLAMA, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": CONTEXT, "eos_token_id": 2}
    drawn = torch.Generator().manual_seed(seed)
    tensors = llama_tensors(decoder_config(config))
    save_file({name: torch.randn(zero.shape, generator=drawn) for name, zero in tensors.items()}, folder / SINGLE_FILE)
    (folder / CONFIG).write_text(json.dumps(config))
    write_tokenizer(folder, template)
    return folder


def write_tokenizer(folder: Path, template: str = PLAIN_TEMPLATE) -> int:
    """Write the tokenizer's files; the size of its vocabulary."""
    tokenizer = byte_level()
    (folder / "tokenizer.json").write_text(json.loads(tokenizer.to_json())["inner"])
    (folder / SETTINGS).write_text(json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}))
    (folder / TEMPLATE).write_text(template)
    return tokenizer.vocab_size
