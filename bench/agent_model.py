"""A random model in a Hugging Face folder, for `bench.agent_loop`: `python -m bench.agent_model --shape 8b --out PATH`.

Weights in bf16, in shards, made on the GPU where there is one. The vocabulary is all bytes, the words of the benchmark,
and unused words of four letters up to the shape's size; each word is one token, and the same token when its text is
read again. Tokens that are no words have zeros in the last layer, so that a greedy answer is words alone and never ends
by itself. Started as a process of its own, so that nobody else has its memory on the GPU.
"""

import argparse
import itertools
import json
import string
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench import gpu_shapes
from bench.agent_loop import WORDS
from roost.models.decoder_layers import DecoderConfig
from roost.weights.folder import CONFIG, INDEX, SETTINGS, TEMPLATE

SHAPES = {"8b": gpu_shapes.SHAPES["8b"], "tiny": gpu_shapes.shape(2, 64, 128, 4, 2, 2048, False)}
CONTEXT = 131072
SHARD_BYTES = 4 * 10**9
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROLES = ("system", "user", "assistant")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPACE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(" ")[0][0]


def vocabulary(size: int) -> tuple[list[str], int]:
    """The tokens as a byte-level vocabulary writes them, and how many stand before the first word."""
    first = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *ROLES]
    letters = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    words = itertools.chain(WORDS, (word for word in letters if word not in WORDS))
    return [*first, *(_SPACE + word for word in itertools.islice(words, size - len(first)))], len(first)


def tokenizer_of(tokens: list[str]) -> Tokenizer:
    """A tokenizer without merges: a word of the vocabulary is one token, any other its bytes."""
    made = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(tokens)}, merges=[], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(CONTROL))
    return made


def tensors_of(config: DecoderConfig, num_wordless: int) -> Iterator[tuple[str, Tensor]]:
    """All tensors by name, made one after the other."""
    state = gpu_shapes.RandomState(config)
    for name in state:
        tensor = state[name].to(torch.bfloat16)
        if name == "lm_head.weight":
            tensor[:num_wordless] = 0
        yield name, tensor.cpu()


def write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Files of a bounded size, and the index that says which tensor is where."""
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file)
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > SHARD_BYTES:
            write()
        shard[name] = tensor
    write()
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def config_of(shape: DecoderConfig) -> dict[str, object]:
    """Its config.json."""
    (rope,) = {layer.rope for layer in shape.layers}
    assert rope is not None
    return {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "eos_token_id": CONTROL.index("<|im_end|>"),
    }


def write_model(folder: Path, shape: DecoderConfig) -> None:
    """All files of the folder; config.json is the last, so that a folder with one is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens, num_wordless = vocabulary(shape.vocab_size)
    assert len(tokens) == shape.vocab_size and not shape.tied
    tokenizer_of(tokens).save(str(folder / "tokenizer.json"))
    (folder / SETTINGS).write_text(json.dumps({"eos_token": "<|im_end|>", "add_bos_token": False}))
    (folder / TEMPLATE).write_text(CHAT)
    write_shards(folder, tensors_of(shape, num_wordless))
    (folder / CONFIG).write_text(json.dumps(config_of(shape), indent=1))


def main() -> int:
    """Write a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    write_model(args.out, SHAPES[args.shape])
    return 0


if __name__ == "__main__":
    sys.exit(main())
