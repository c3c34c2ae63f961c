"""A GGUF file: its metadata as plain values, its tensors under Hugging Face's names, as a checkpoint has them.

Tensors are dequantised one at a time when they are asked for, or given as the blocks they are stored in; an expert's
matrix is a part of its layer's. What a converter did to them is undone as the architecture says: rows of queries and
keys are reordered from interleaved rotary pairs to the two halves that the layers expect, norms lose what was added.
Errors say what is wrong with the file. Called by `load`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.gguf_blocks import BLOCK_KINDS, BLOCK_LEN, GgufWeight
from roost.models.parts import Cut, Length, Shape, check_shape, covering, cut, cut_unit, in_units
from roost.text.gguf import tokenizer_from_gguf
from roost.text.language import Language, make_template
from roost.weights.gguf_architectures import ARCHITECTURES
from roost.weights.source import Source

MAGIC = b"GGUF"
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
        name = self.fields.get("general.architecture")
        if not isinstance(name, str) or name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{path} is of architecture {name}, which is not known; known are {known}")
        self._architecture = ARCHITECTURES[name]
        self._factors = [tensor for tensor in tensors if tensor.name == _ROPE_FACTORS]
        # by Hugging Face's name: the tensor, and which part of it
        self._tensors: dict[str, tuple[gguf.ReaderTensor, int | None]] = {}
        for tensor in tensors:
            if tensor.name != _ROPE_FACTORS:
                self._tensors |= self._named(tensor)

    @property
    def stored_form(self) -> str | None:
        """Blocks, as `layers.gguf_blocks` knows them."""
        return GgufWeight.form

    def quantised(self, name: str, device: torch.device, shape: Shape | None = None) -> GgufWeight | None:
        """The matrix `name` as blocks on a device, or a part of it; None where it is stored in another way."""
        tensor, part = self._tensors[name]
        kind = BLOCK_KINDS.get(tensor.tensor_type.name)
        if kind is None:
            return None
        stored = _part(tensor, part)
        if shape is not None:
            self._check_shape(name, shape)
            out_len, in_len = shape
            num_blocks = in_units(in_len, BLOCK_LEN)
            if num_blocks is None:
                assert isinstance(in_len, Cut)
                raise cut_unit(name, in_len, BLOCK_LEN, "inputs")
            stored = _stored_part(stored, (out_len,), num_blocks, kind.num_bytes)
        rows = torch.from_numpy(stored.copy()).to(device)
        if name.endswith(_ROTATED) and self._architecture.is_paired:
            rows = self._in_halves(rows, name)
        return GgufWeight(blocks=rows.unflatten(1, (-1, kind.num_bytes)), kind=kind)

    def __getitem__(self, name: str) -> Tensor:
        tensor, part = self._tensors[name]
        return self._dequantised(name, _part(tensor, part))

    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor; of blocks, those that it lies in are read."""
        self._check_shape(name, shape)
        tensor, part = self._tensors[name]
        block_len, num_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        *outs, in_len = shape
        num_blocks, inner = covering(in_len, block_len)
        stored = _part(tensor, part)
        found = self._dequantised(name, _stored_part(stored, outs, num_blocks, num_bytes // stored.itemsize))
        return cut(found, (*found.shape[:-1], inner))

    def _check_shape(self, name: str, shape: Shape) -> None:
        tensor, part = self._tensors[name]
        found = [int(each) for each in reversed(tensor.shape)]
        check_shape(name, found if part is None else found[1:], shape)

    def _dequantised(self, name: str, stored: np.ndarray) -> Tensor:
        tensor, _ = self._tensors[name]
        try:
            values = torch.from_numpy(gguf.quants.dequantize(stored, tensor.tensor_type).copy())
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigError(f"{self._path}: {tensor.name} is of type {kind}, which cannot be dequantised") from error
        if name.endswith(_ROTATED) and self._architecture.is_paired:
            return self._in_halves(values, name)
        return values - self._architecture.norm_offset if name.endswith("norm.weight") else values

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def config(self) -> dict[str, object]:
        """The config.json that the same model would have."""
        sizes = {name: self.value(key) for name, key in _SIZES.items()}
        return {
            **sizes,
            "architectures": [self._architecture.model],
            "vocab_size": len(self._list("tokenizer.ggml.tokens")),
            "num_key_value_heads": self.value("attention.head_count_kv", sizes["num_attention_heads"]),
            "head_dim": self.head_dim(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            **self._architecture.config(self),
        }

    def language(self) -> Language:
        """Its tokenizer and chat template."""
        tokenizer = tokenizer_from_gguf(self.fields)
        return Language(
            tokenizer=tokenizer, template=make_template(self.fields.get("tokenizer.chat_template"), tokenizer)
        )

    def rope(self) -> dict[str, object]:
        """The rope's parameters: its base, and the scaling for longer contexts."""
        theta, scale = self.value("rope.freq_base", self._architecture.theta), self._scale()
        if not self._factors:
            return {"rope_type": "linear", "rope_theta": theta, "factor": scale}
        factors = [float(factor) * scale for factor in self._factors[0].data]
        if len(factors) != self.head_dim() // 2:
            raise ConfigError(f"{self._path}: {_ROPE_FACTORS} is {len(factors)} long, not {self.head_dim() // 2}")
        return {"rope_type": "factors", "rope_theta": theta, "factors": factors}

    def _scale(self) -> float:
        """The factor that every frequency is divided by; without a type, linear scaling is meant."""
        name = self._architecture.name
        stated = next((key for key in _ROPE_SCALES if f"{name}.{key}" in self.fields), None)
        kind = self.value("rope.scaling.type", "none" if stated is None else "linear")
        if kind == "none":
            return 1.0
        if kind != "linear":
            raise ConfigError(f"{self._path}: rope scaling {kind} is not known; known are none and linear")
        scale = self.value(stated or _ROPE_SCALES[0])
        if not isinstance(scale, float) or not scale > 0:
            raise ConfigError(f"{self._path}: {name}.{stated} must be a number above 0, got {scale}")
        return scale

    def _in_halves(self, values: Tensor, name: str) -> Tensor:
        """Rows of a head from (0, half, 1, half + 1, …) to (0, 1, …, half, half + 1, …)."""
        head_dim = self.head_dim()
        if values.ndim != 2 or values.shape[0] % head_dim:
            raise ConfigError(f"{self._path}: {name} is {list(values.shape)}, not rows in multiples of {head_dim}")
        pairs = values.reshape(values.shape[0] // head_dim, head_dim // 2, 2, values.shape[1])
        return pairs.transpose(1, 2).reshape(values.shape)

    def head_dim(self) -> int:
        """Length of a head."""
        hidden, heads = self.value("embedding_length"), self.value("attention.head_count")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            name = self._architecture.name
            raise ConfigError(f"{self._path}: {name}.attention.head_count must be a number, got {heads}")
        length = self.value("attention.key_length", hidden // heads)
        rotated = self.value("rope.dimension_count", length)
        if not isinstance(length, int) or rotated != length:
            raise ConfigError(
                f"{self._path}: heads of {length} of which only {rotated} dimensions are rotated are not supported"
            )
        return length

    def value(self, key: str, default: object = None) -> object:
        """The value of one of its architecture's keys."""
        name = f"{self._architecture.name}.{key}"
        found = self.fields.get(name, default)
        if found is None:
            raise ConfigError(f"{self._path}: its metadata has no {name}")
        return found

    def _named(self, tensor: gguf.ReaderTensor) -> dict[str, tuple[gguf.ReaderTensor, int | None]]:
        """A tensor, or each expert's part of it, by Hugging Face's name."""
        own, (base, _, kind) = self._architecture, tensor.name.rpartition(".")
        if base in _NAMES:
            return {f"{_NAMES[base]}.{kind}": (tensor, None)}
        block, number, part = [*base.split(".", 2), "", ""][:3]
        layer = f"model.layers.{number}."
        if block == "blk" and part in own.names:
            return {f"{layer}{own.names[part]}.{kind}": (tensor, None)}
        if block == "blk" and part == own.router:
            return {f"{layer}mlp.gate.{kind}": (tensor, None)}
        if block == "blk" and part in own.experts:
            names = (f"{layer}mlp.experts.{expert}.{own.experts[part]}.{kind}" for expert in range(len(tensor.data)))
            return {name: (tensor, expert) for expert, name in enumerate(names)}
        raise ConfigError(f"{self._path} has a tensor {tensor.name} that no supported {own.name} model has")

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


def _part(tensor: gguf.ReaderTensor, part: int | None) -> np.ndarray:
    """What a tensor stores, or one expert's part of that."""
    return tensor.data if part is None else tensor.data[part]


def _stored_part(stored: np.ndarray, outs: Sequence[Length], num_blocks: Length, block_size: int) -> np.ndarray:
    """Rows of stored blocks, each of so many entries, of which lengths say which."""
    runs = [(0, each) if isinstance(each, int) else each.runs[0] for each in (*outs, num_blocks)]
    first, last = runs.pop()
    return stored[(*(slice(*each) for each in runs), slice(first * block_size, last * block_size))]
