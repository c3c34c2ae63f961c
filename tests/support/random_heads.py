"""Random EAGLE heads for the tiny targets, written as folders, and what a pass of one is, in plain torch.

The reference reads the same files with nothing of Roost: loops over heads and pairs of dimensions, a whole sequence at
once. Used by the parity tests.
"""

import json
from math import pi
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, linear, silu, softmax
from transformers import PreTrainedModel

from roost.models.decoder import Decoder
from roost.models.model import PairHead
from roost.weights.draft import load_head
from tests.support.tiny_models import DEVICE, VOCAB

Config = dict[str, object]

HIDDEN = 48
FEWER = 40  # tokens of a reduced vocabulary
LLAMA3: Config = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CONFIG: Config = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.02,
    "hidden_act": "silu",
    "rope_theta": 300.0,
    "tie_word_embeddings": False,
}


def write_eagle(
    folder: Path, changes: Config | None = None, *, fc_bias: bool = True, own_embed: bool = True, prefix: str = ""
) -> Path:
    """An EAGLE-1 or 2 head."""
    config = {**_CONFIG, "architectures": ["LlamaForCausalLMEagle"], **(changes or {})}
    hidden = _size(config, "hidden_size")
    shapes = {"fc.weight": (hidden, 2 * hidden)}
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    if own_embed:
        shapes["embed_tokens.weight"] = (_size(config, "vocab_size"), hidden)
    for number in range(_size(config, "num_hidden_layers")):
        shapes |= _layer(config, f"layers.{number}.", hidden)
        if number == 0:
            del shapes["layers.0.input_layernorm.weight"]
    return write(folder, config, {prefix + name: tensor for name, tensor in _random(shapes).items()})


def write_eagle3(
    folder: Path,
    changes: Config | None = None,
    *,
    layer: str = "midlayer.",
    num_tokens: int = FEWER,
    fc_bias: bool = False,
    own_embed: bool = False,
    own_head: bool = True,
    prefix: str = "",
) -> Path:
    """An EAGLE-3 head that reads three hidden states."""
    sizes = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": num_tokens}
    config = {**_CONFIG, **sizes, **(changes or {})}
    hidden, vocab = _size(config, "hidden_size"), _size(config, "vocab_size")
    shapes = {"fc.weight": (hidden, 3 * _size(config, "target_hidden_size", hidden)), "norm.weight": (hidden,)}
    if fc_bias:
        shapes["fc.bias"] = (hidden,)
    if own_embed:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    shapes |= _layer(config, layer, 2 * hidden) | {f"{layer}hidden_norm.weight": (hidden,)}
    tensors = {prefix + name: tensor for name, tensor in _random(shapes).items()}
    if own_head:
        tensors |= _random({"lm_head.weight": (num_tokens, hidden)}, seed=1)
    if num_tokens < vocab:
        kept = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[:num_tokens].sort().values
        tensors["d2t"] = kept - torch.arange(num_tokens)
        tensors["t2d"] = torch.isin(torch.arange(vocab), kept)
    return write(folder, config, tensors)


def write(folder: Path, config: Config, tensors: dict[str, Tensor]) -> Path:
    """A folder of a config and tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    """The config and the tensors of a folder, as they were written."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def features(reference: PreTrainedModel, prompt: tuple[int, ...], layers: tuple[int, ...]) -> Tensor:
    """What the target gives a head at each token: its last hidden state, or those at the inputs of some layers."""
    with torch.no_grad():
        states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return torch.cat([states[number][0] for number in layers or (-1,)], dim=-1)


@torch.no_grad()
def run(folder: Path, reference: PreTrainedModel, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and hidden states of a head over a sequence: tokens 1 to n, and the target's features 0 to n - 1."""
    config, state = read(folder)
    state = {name.removeprefix("model.").replace("midlayer.", "layers.0."): each for name, each in state.items()}
    if "embed_tokens.weight" in state:
        embedded = state["embed_tokens.weight"][tokens]
    else:
        embedded = reference.get_input_embeddings()(tokens)
    if "Eagle3" not in str(config["architectures"]):
        hidden = linear(torch.cat([embedded, hidden], dim=-1), state["fc.weight"], state.get("fc.bias"))
        for number in range(_size(config, "num_hidden_layers")):
            name = f"layers.{number}."
            inputs = hidden if number == 0 else _norm(hidden, state[f"{name}input_layernorm.weight"], config)
            hidden = _run_layer(config, state, name, hidden, inputs)
        return _by_the_target(reference, hidden), hidden
    fused = linear(hidden, state["fc.weight"], state.get("fc.bias"))
    normed = _norm(fused, state["layers.0.hidden_norm.weight"], config)
    inputs = torch.cat([_norm(embedded, state["layers.0.input_layernorm.weight"], config), normed], dim=-1)
    residual = normed if config.get("norm_before_residual") else fused
    hidden = _run_layer(config, state, "layers.0.", residual, inputs)
    last = _norm(hidden, state["norm.weight"], config)
    if "lm_head.weight" not in state:
        return _by_the_target(reference, last), hidden
    return linear(last, state["lm_head.weight"]), hidden


def _by_the_target(reference: PreTrainedModel, last: Tensor) -> Tensor:
    """Logits by the target's own head, capped as it caps them."""
    logits, cap = reference.get_output_embeddings()(last), reference.config.to_dict().get("final_logit_softcapping")
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _run_layer(config: Config, state: dict[str, Tensor], name: str, residual: Tensor, inputs: Tensor) -> Tensor:
    mixed = _attention(config, {key.removeprefix(name): each for key, each in state.items()}, inputs)
    hidden = residual + mixed
    normed = _norm(hidden, state[f"{name}post_attention_layernorm.weight"], config)
    gate = linear(normed, state[f"{name}mlp.gate_proj.weight"])
    gate = silu(gate) if config["hidden_act"] == "silu" else gelu(gate, approximate="tanh")
    up = linear(normed, state[f"{name}mlp.up_proj.weight"])
    return hidden + linear(gate * up, state[f"{name}mlp.down_proj.weight"])


def _attention(config: Config, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    num_heads, num_kv = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    dim, num_tokens = _size(config, "head_dim"), len(inputs)
    query, key, value = (
        linear(inputs, state[f"self_attn.{each}_proj.weight"], state.get(f"self_attn.{each}_proj.bias"))
        for each in "qkv"
    )
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    outputs = []
    for head in range(num_heads):
        shared = head * num_kv // num_heads
        mine = _rotated(config, query[:, head * dim : (head + 1) * dim])
        other = _rotated(config, key[:, shared * dim : (shared + 1) * dim])
        weights = softmax((mine @ other.T / dim**0.5).masked_fill(future, -torch.inf), dim=-1)
        outputs.append(weights @ value[:, shared * dim : (shared + 1) * dim])
    return linear(torch.cat(outputs, dim=-1), state["self_attn.o_proj.weight"], state.get("self_attn.o_proj.bias"))


def _rotated(config: Config, vectors: Tensor) -> Tensor:
    """One head's queries or keys, rotated by their positions."""
    half, positions = vectors.shape[-1] // 2, torch.arange(len(vectors))
    rotated = vectors.clone()
    for i in range(half):
        angle = positions * _frequency(config, i / half)
        left, right = vectors[:, i], vectors[:, i + half]
        rotated[:, i] = left * angle.cos() - right * angle.sin()
        rotated[:, i + half] = right * angle.cos() + left * angle.sin()
    return rotated


def _frequency(config: Config, exponent: float) -> float:
    frequency = float(str(config["rope_theta"])) ** -exponent
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return frequency
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * pi)
    if turns < scaling["low_freq_factor"]:
        return frequency / scaling["factor"]
    if turns > scaling["high_freq_factor"]:
        return frequency
    share = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    return share * frequency + (1 - share) * frequency / scaling["factor"]


def _norm(vectors: Tensor, weight: Tensor, config: Config) -> Tensor:
    eps = float(str(config["rms_norm_eps"]))
    return vectors / (vectors.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt() * weight


def _layer(config: Config, name: str, in_len: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors."""
    hidden, wide = _size(config, "hidden_size"), _size(config, "intermediate_size")
    dim = _size(config, "head_dim")
    query, kv = _size(config, "num_attention_heads") * dim, _size(config, "num_key_value_heads") * dim
    projections = {"q": (query, in_len), "k": (kv, in_len), "v": (kv, in_len), "o": (hidden, query)}
    feeds = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}self_attn.{k}_proj.weight": shape for k, shape in projections.items()}
    if config.get("attention_bias"):
        shapes |= {f"{name}self_attn.{k}_proj.bias": shape[:1] for k, shape in projections.items()}
    shapes |= {f"{name}mlp.{k}_proj.weight": shape for k, shape in feeds.items()}
    return shapes | {f"{name}{k}_layernorm.weight": (hidden,) for k in ("input", "post_attention")}


def _random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Weights that show a wrong one: norms around one, biases as large as what they are added to."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    return {name: tensor + 1 if "norm" in name else tensor for name, tensor in tensors.items()}


def _size(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name, default)
    assert isinstance(value, int)
    return value


def make_head(kind: str, model: Decoder) -> PairHead:
    """A random head for a tiny target, by way of its files."""
    with TemporaryDirectory() as folder:
        path = {"eagle": write_eagle, "eagle3": write_eagle3}[kind](Path(folder))
        return load_head(path, kind, model, layer_ids=None, weights="fp32", device=DEVICE)
