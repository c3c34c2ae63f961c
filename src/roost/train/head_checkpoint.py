"""Head checkpoints: initial weights made from the target's, and reading and writing a trained head.

The format is SGLang's and vLLM's (`LlamaForCausalLMEagle3`): fc, midlayer, norm, lm_head, d2t, t2d and a config.json.
Called by the training pipeline.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from roost.errors import ConfigError
from roost.layers.rotary import Rope
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.train.head import HeadShape
from roost.weights import int8_lm_head

FEED = "midlayer.mlp.gate_proj.weight"
NOISE = 0.02  # standard deviation of weights without a counterpart in the target


def head_shape(target: DecoderConfig, num_features: int, num_tokens: int, feed_size: int) -> HeadShape:
    """A head of one plain Llama layer with the target's sizes, except for its feed-forward.

    Other features of the target's layers (windows, extra norms, rope scaling) are not copied.
    """
    layers = DecoderConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=feed_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        context_max=target.context_max,
        layers=(LayerKind(rope=Rope(theta=target.layers[-1].rope.theta)),),
        scale=target.head_dim**-0.5,
        norm_eps=target.norm_eps,
        tied=False,
    )
    return HeadShape(layers=layers, num_features=num_features, num_tokens=num_tokens)


def weight_sizes(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Names and sizes of a head's weights."""
    layers = shape.layers
    hidden, feed = layers.hidden_size, layers.intermediate_size
    heads, kv_heads = layers.num_heads * layers.head_dim, layers.num_kv_heads * layers.head_dim
    matrices = {
        "fc": (hidden, shape.num_features * hidden),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (feed, hidden),
        "midlayer.mlp.up_proj": (feed, hidden),
        "midlayer.mlp.down_proj": (hidden, feed),
        "lm_head": (shape.num_tokens, hidden),
    }
    midlayer = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    norms = {name: (hidden,) for name in ("norm", *(f"midlayer.{name}" for name in midlayer))}
    return {f"{name}.weight": size for name, size in {**matrices, **norms}.items()}


def warm_start(
    weights: Mapping[str, Tensor], target: DecoderConfig, shape: HeadShape, vocabulary: Tensor
) -> dict[str, Tensor]:
    """Initial weights: the target's last layer, its final norm, and the rows of its LM head that can be drafted."""
    generator = torch.Generator().manual_seed(0)
    hidden, feed = shape.layers.hidden_size, shape.layers.intermediate_size
    # how much of the feed-forward is the target's: a mixture of experts is no start
    width = target.intermediate_size if target.layers[-1].feed_forward is None else 0

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * NOISE

    def take(name: str) -> Tensor:
        offset = target.norm_offset if "norm" in name else 0.0
        return weights[name].to(torch.float32) + offset

    names, layers = target.names, f"{target.names.root}layers."
    last = f"{layers}{target.num_layers - 1}."
    attention = f"{layers}{_like_the_heads(target)}."
    state = {"fc.weight": noise(hidden, shape.num_features * hidden)}
    state["fc.weight"][:, -hidden:] += torch.eye(hidden)  # at first it passes the last feature through
    for own, theirs in (("q", names.query), ("k", names.key), ("v", names.value)):
        weight = take(f"{attention}{theirs}.weight")
        if own == "q" and target.out_gate:  # without the gates
            weight = weight.view(target.num_heads, 2, -1, hidden)[:, 0].flatten(0, 1)
        state[f"midlayer.self_attn.{own}_proj.weight"] = torch.cat([noise(*weight.shape), weight], dim=1)
    state["midlayer.self_attn.o_proj.weight"] = take(f"{attention}{names.out}.weight")
    # the part wider than the target's has no effect at first: down_proj is zero there
    for own, theirs in (("gate", names.gate), ("up", names.up)):
        weight = take(f"{last}{theirs}.weight") if width else torch.empty(0, hidden)
        state[f"midlayer.mlp.{own}_proj.weight"] = torch.cat([weight, noise(feed - width, hidden)])
    weight = take(f"{last}{names.down}.weight") if width else torch.empty(hidden, 0)
    state["midlayer.mlp.down_proj.weight"] = pad(weight, (0, feed - width))
    state["midlayer.post_attention_layernorm.weight"] = take(f"{last}{target.norms.before_feed}.weight")
    state["midlayer.hidden_norm.weight"] = take(f"{last}{target.norms.before_attention}.weight")
    state["midlayer.input_layernorm.weight"] = torch.ones(hidden)
    state["norm.weight"] = take(f"{names.root}{names.last_norm}.weight")
    state["lm_head.weight"] = _target_rows(weights, target, vocabulary)
    return state


def _like_the_heads(target: DecoderConfig) -> int:
    """The last layer whose attention is as the head's: with keys and values of its own, of the config's sizes."""
    usual = target.num_kv_heads, target.head_dim
    for number, layer in reversed(list(enumerate(target.layers))):
        own = target.heads_of(layer)
        keeps_both = layer.attends and layer.shares is None and not layer.values_are_keys
        if keeps_both and (own.num_kv_heads, own.head_dim) == usual:
            return number
    raise ConfigError("the target has no layer whose attention a head could start from")


def _target_rows(weights: Mapping[str, Tensor], target: DecoderConfig, vocabulary: Tensor) -> Tensor:
    """The rows of the target's LM head that can be drafted: [num_tokens, hidden_size]."""
    name = f"{target.names.root}embed_tokens.weight" if target.tied else "lm_head.weight"
    return weights[name].to(torch.float32)[vocabulary.cpu()].clone()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GivenHead:
    """A trained head."""

    weights: dict[str, Tensor]
    vocabulary: Tensor  # ids of the target's tokens, ascending
    key: str  # a hash that identifies it

    @property
    def feed_size(self) -> int:
        """The width of its feed-forward."""
        return len(self.weights[FEED])


def with_vocabulary(
    given: GivenHead, weights: Mapping[str, Tensor], target: DecoderConfig, vocabulary: Tensor
) -> dict[str, Tensor]:
    """The weights of a given head for another draft vocabulary.

    Tokens that are new to it get the target's rows, mapped as best fits the rows that both have.
    """
    own = given.weights["lm_head.weight"].to(torch.float32)
    theirs, wanted = (_target_rows(weights, target, ids) for ids in (given.vocabulary, vocabulary))
    rows = wanted @ torch.linalg.lstsq(theirs, own).solution
    at = torch.searchsorted(given.vocabulary, vocabulary.cpu()).clamp(max=len(own) - 1)
    is_known = given.vocabulary[at] == vocabulary.cpu()
    return {**given.weights, "lm_head.weight": torch.where(is_known[:, None], own[at], rows)}


def read_head(folder: Path) -> GivenHead:
    """A head that `write_head` wrote."""
    try:
        tensors: Mapping[str, Tensor] = load_file(folder / "model.safetensors")
        if int8_lm_head.is_named_in(json.loads((folder / "config.json").read_text(encoding="utf-8"))):
            tensors = int8_lm_head.WithFloats(tensors)
        key = blake2b((folder / "model.safetensors").read_bytes(), digest_size=8).hexdigest()
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"--from-head {folder}: has no readable head: {error}") from error
    for name in ("d2t", FEED):
        if name not in tensors:
            raise ConfigError(f"--from-head {folder}: has no {name}, so it is no EAGLE-3 head with its own vocabulary")
    vocabulary = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    weights = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return GivenHead(weights=weights, vocabulary=vocabulary, key=key)


def write_head(
    folder: Path, state: Mapping[str, Tensor], shape: HeadShape, vocabulary: Tensor, lm_head: str = "bf16"
) -> None:
    """Write a head's checkpoint: model.safetensors, atomically, and config.json."""
    layers, ids = shape.layers, vocabulary.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in state.items()}
    marks = torch.zeros(layers.vocab_size, dtype=torch.bool)
    marks[ids] = True
    is_rounded = lm_head == "int8"
    tensors |= int8_lm_head.rounded(state[int8_lm_head.NAME]) if is_rounded else {}
    tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marks}
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)  # safetensors creates files that only their owner can read
    part.replace(folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layers.hidden_size,
        "target_hidden_size": layers.hidden_size,
        "intermediate_size": layers.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layers.num_heads,
        "num_key_value_heads": layers.num_kv_heads,
        "head_dim": layers.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": layers.norm_eps,
        "rope_theta": layers.layers[0].rope.theta,
        "max_position_embeddings": layers.context_max,
        "vocab_size": layers.vocab_size,
        "draft_vocab_size": len(ids),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **({int8_lm_head.KEY: int8_lm_head.QUANTISATION} if is_rounded else {}),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
