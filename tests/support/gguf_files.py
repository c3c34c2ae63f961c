"""Tiny GGUF files of the llama architecture, written with the gguf package. Used by the tests of reading them."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from tests.support.small_vocabularies import byte_fields

Reals = NDArray[np.float32]
Fields = dict[str, object]

HIDDEN, WIDE, HEADS, KV_HEADS, LAYERS, HEAD_DIM = 64, 96, 4, 2, 2, 16  # rows of 32: what a block of Q8_0 holds
VOCAB = len(byte_fields()["tokenizer.ggml.tokens"])  # type: ignore[arg-type]

FIELDS: Fields = {
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": WIDE,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 0.01,
    "llama.rope.freq_base": 700.0,
    "llama.rope.dimension_count": HEAD_DIM,
    **byte_fields(),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a model and their shapes, [out, in]."""
    block = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (WIDE, HIDDEN),
        "ffn_up": (WIDE, HIDDEN),
        "ffn_down": (HIDDEN, WIDE),
    }
    whole = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,), "output": (VOCAB, HIDDEN)}
    whole |= {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in whole.items()}


def zeros() -> dict[str, Reals]:
    """Tensors that say nothing."""
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes().items()}


def write(
    path: Path,
    *,
    fields: Fields = FIELDS,
    tensors: dict[str, Reals] | None = None,
    kind: Kind = Kind.F32,
    stored: Mapping[str, tuple[NDArray[np.uint8], Kind]] | None = None,
    architecture: str = "llama",
) -> Path:
    """A file; matrices are kept as `kind`, vectors as F32. A field of None is left out.

    `stored` are bytes in place of some of the tensors, and what they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        _add(writer, key, value)
    for name, tensor in (zeros() if tensors is None else tensors).items():
        if stored is not None and name in stored:
            writer.add_tensor(name, stored[name][0], raw_dtype=stored[name][1])
            continue
        own = kind if tensor.ndim > 1 else Kind.F32
        if own in (Kind.F32, Kind.F16):
            writer.add_tensor(name, tensor.astype(np.float16 if own is Kind.F16 else np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise AssertionError(key)
