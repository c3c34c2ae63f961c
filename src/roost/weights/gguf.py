"""A GGUF file of the `llama` architecture: its metadata as plain values, its tensors under Hugging Face's names.

Tensors are dequantised one at a time when they are asked for, or given as the blocks they are stored in. Rows of
queries and keys are reordered from GGUF's interleaved rotary pairs to the two halves that the layers expect. Errors say
what is wrong with the file. Called by `load`.
"""

from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.gguf_blocks import BLOCK_KINDS, GgufWeight
from roost.text.gguf import tokenizer_from_gguf
from roost.text.language import Language, make_template
from roost.weights.source import Source

MAGIC = b"GGUF"
_ARCHITECTURE = "llama"
_BLOCK_NAMES = {
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
_ROTATED = ("q_proj.weight", "k_proj.weight")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's rope scaling: what each frequency is divided by
_ROPE_SCALES = ("rope.scaling.factor", "rope.scale_linear")  # the second is the older name
_SIZES = {  # config.json's names of what the metadata must say
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


class GgufFile(Source):
    """The tensors of a file by name; one is dequantised each time it is looked up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fields, tensors = _open(path)
        architecture = self.fields.get("general.architecture")
        if architecture != _ARCHITECTURE:
            raise ConfigError(f"{path} is of architecture {architecture}; GGUF files are read of {_ARCHITECTURE} only")
        self._factors = [tensor for tensor in tensors if tensor.name == _ROPE_FACTORS]
        self._tensors = {_hub_name(path, each.name): each for each in tensors if each.name != _ROPE_FACTORS}

    @property
    def stored_form(self) -> str | None:
        """Blocks, as `layers.gguf_blocks` knows them."""
        return GgufWeight.form

    def quantised(self, name: str, device: torch.device) -> GgufWeight | None:
        """The matrix `name` as blocks on a device; None where it is stored in another way."""
        tensor = self._tensors[name]
        kind = BLOCK_KINDS.get(tensor.tensor_type.name)
        if kind is None:
            return None
        rows = torch.from_numpy(tensor.data.copy()).to(device)
        if name.endswith(_ROTATED):
            rows = self._in_halves(rows, name)
        return GgufWeight(blocks=rows.unflatten(1, (-1, kind.num_bytes)), kind=kind)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        try:
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigError(f"{self._path}: {tensor.name} is of type {kind}, which cannot be dequantised") from error
        if name.endswith(_ROTATED):
            return self._in_halves(values, name)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def config(self) -> dict[str, object]:
        """The config.json that the same model would have."""
        sizes = {name: self._value(key) for name, key in _SIZES.items()}
        return {
            **sizes,
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(self._list("tokenizer.ggml.tokens")),
            "num_key_value_heads": self._value("attention.head_count_kv", sizes["num_attention_heads"]),
            "head_dim": self._head_dim(),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            **self._rope(),
        }

    def language(self) -> Language:
        """Its tokenizer and chat template."""
        tokenizer = tokenizer_from_gguf(self.fields)
        return Language(
            tokenizer=tokenizer, template=make_template(self.fields.get("tokenizer.chat_template"), tokenizer)
        )

    def _rope(self) -> dict[str, object]:
        """The rope's parameters: its base, and the scaling for longer contexts."""
        theta, scale = self._value("rope.freq_base", 10000.0), self._scale()
        if not self._factors:
            return {"rope_parameters": {"rope_type": "linear", "rope_theta": theta, "factor": scale}}
        factors = [float(factor) * scale for factor in self._factors[0].data]
        if len(factors) != self._head_dim() // 2:
            raise ConfigError(f"{self._path}: {_ROPE_FACTORS} is {len(factors)} long, not {self._head_dim() // 2}")
        return {"rope_parameters": {"rope_type": "factors", "rope_theta": theta, "factors": factors}}

    def _scale(self) -> float:
        """The factor that every frequency is divided by; without a type, linear scaling is meant."""
        stated = next((key for key in _ROPE_SCALES if f"{_ARCHITECTURE}.{key}" in self.fields), None)
        kind = self._value("rope.scaling.type", "none" if stated is None else "linear")
        if kind == "none":
            return 1.0
        if kind != "linear":
            raise ConfigError(f"{self._path}: rope scaling {kind} is not known; known are none and linear")
        scale = self._value(stated or _ROPE_SCALES[0])
        if not isinstance(scale, float) or not scale > 0:
            raise ConfigError(f"{self._path}: {_ARCHITECTURE}.{stated} must be a number above 0, got {scale}")
        return scale

    def _in_halves(self, values: Tensor, name: str) -> Tensor:
        """Rows of a head from (0, half, 1, half + 1, …) to (0, 1, …, half, half + 1, …)."""
        head_dim = self._head_dim()
        if values.ndim != 2 or values.shape[0] % head_dim:
            raise ConfigError(f"{self._path}: {name} is {list(values.shape)}, not rows in multiples of {head_dim}")
        pairs = values.reshape(values.shape[0] // head_dim, head_dim // 2, 2, values.shape[1])
        return pairs.transpose(1, 2).reshape(values.shape)

    def _head_dim(self) -> int:
        hidden, heads = self._value("embedding_length"), self._value("attention.head_count")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise ConfigError(f"{self._path}: {_ARCHITECTURE}.attention.head_count must be a number, got {heads}")
        length = self._value("attention.key_length", hidden // heads)
        rotated = self._value("rope.dimension_count", length)
        if not isinstance(length, int) or rotated != length:
            raise ConfigError(
                f"{self._path}: heads of {length} of which only {rotated} dimensions are rotated are not supported"
            )
        return length

    def _value(self, key: str, default: object = None) -> object:
        value = self.fields.get(f"{_ARCHITECTURE}.{key}", default)
        if value is None:
            raise ConfigError(f"{self._path}: its metadata has no {_ARCHITECTURE}.{key}")
        return value

    def _list(self, key: str) -> list[object]:
        value = self.fields.get(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self._path}: its metadata has no {key}")
        return value


def _open(path: Path) -> tuple[dict[str, object], list[gguf.ReaderTensor]]:
    """Metadata and tensors of a file; raises ConfigError if it is not GGUF or is truncated."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
    try:
        reader = gguf.GGUFReader(path)
        return {name: field.contents() for name, field in reader.fields.items()}, reader.tensors
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # the gguf library's errors for damaged files
        size = path.stat().st_size
        raise ConfigError(
            f"{path} is truncated or damaged: its {size} bytes are not the tensors its header lists; download it again"
        ) from error


def _hub_name(path: Path, name: str) -> str:
    """Hugging Face's name of a tensor."""
    base, _, kind = name.rpartition(".")
    if base in _NAMES:
        return f"{_NAMES[base]}.{kind}"
    block, number, part = [*base.split(".", 2), "", ""][:3]
    if block == "blk" and part in _BLOCK_NAMES:
        return f"model.layers.{number}.{_BLOCK_NAMES[part]}.{kind}"
    raise ConfigError(f"{path} has a tensor {name} that no supported {_ARCHITECTURE} model has")
