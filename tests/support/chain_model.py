"""A tiny checkpoint whose output is known: each token has one successor, and the model gives it the best score.

Saved as a Hugging Face folder: a real Llama whose layers add nothing, whose embeddings are unit vectors and whose head
turns each token into the next one's score. The vocabulary is the small byte-level one. Used by tests of the library,
the command line and stop strings.
"""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file

from roost.models.registry import decoder_config
from roost.text.tokenizer import Tokenizer
from tests.support.config_files import LLAMA, llama_tensors
from tests.support.small_vocabularies import byte_level

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CERTAIN = 60.0  # how far the successor's score is above the others
CONTEXT = 4096
END = "<|im_end|>"


@cache
def tokenizer() -> Tokenizer:
    """The vocabulary."""
    return byte_level()


@cache
def token(piece: str | bytes) -> int:
    """The id of the token that stands for these bytes."""
    wanted = piece.encode() if isinstance(piece, str) else piece
    return next(id for id in range(tokenizer().vocab_size) if tokenizer().piece(id) == wanted)


def save_chain(folder: Path, *pieces: str | bytes, certain: float = CERTAIN, context: int = CONTEXT) -> Path:
    """A model that writes `pieces` after the first of them; the others follow each other by id, round and round."""
    vocab_size = tokenizer().vocab_size
    chain = [token(piece) for piece in pieces]
    assert len(set(chain)) == len(chain), "a token has one successor"
    round_trip = [id for id in range(3, vocab_size) if id not in chain]  # 0 to 2 are special
    follows = dict(zip(round_trip, round_trip[1:] + round_trip[:1], strict=True))
    follows |= dict(zip(chain, chain[1:] + round_trip[:1], strict=True))
    follows |= {id: chain[0] for id in range(3) if id not in chain}
    size = vocab_size + vocab_size % 2
    config = {
        **LLAMA,
        "vocab_size": vocab_size,
        "hidden_size": size,
        "num_hidden_layers": 1,
        "max_position_embeddings": context,
        "eos_token_id": token(END),
    }
    tensors = llama_tensors(decoder_config(config))
    tensors["model.embed_tokens.weight"] = torch.eye(vocab_size, size)
    tensors["model.norm.weight"] = torch.full((size,), size**-0.5)  # undoes the norm of a unit vector
    for before, after in follows.items():
        tensors["lm_head.weight"][after, before] = certain
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.loads(tokenizer().to_json())["inner"])
    settings = {"bos_token": "<|im_start|>", "eos_token": END, "add_bos_token": False, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def written(*pieces: str | bytes) -> str:
    """The text that pieces make."""
    return b"".join(piece.encode() if isinstance(piece, str) else piece for piece in pieces).decode("utf-8", "replace")
