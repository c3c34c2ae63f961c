"""EAGLE draft heads: the decoder's layers over pairs of a token's embedding and a hidden state of the target.

Reads a head's config.json and its tensors in the format of SGLang and vLLM; tensor names come without `model.`, and
with `layers.0.` for `midlayer.`. EAGLE-1 and 2 read the target's last hidden states and use its vocabulary and its
logits; EAGLE-3 reads hidden states of several layers and may have a vocabulary of its own. Holds weights and the target
they belong to; keeps nothing of a batch. Loaded by `weights.draft`, called by the EAGLE drafter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.attention import Attend
from roost.layers.linear import Linear, activation_dtype
from roost.layers.ops import Residual
from roost.layers.rotary import frequencies
from roost.models.decoder import Stack, kv_shapes
from roost.models.decoder_layers import DecoderConfig, Loader
from roost.models.family import HeadFamily
from roost.models.fields import Fields
from roost.models.llama import read_config
from roost.models.model import KvShape, Model
from roost.models.shards import shard_config
from roost.models.tensors import Tensors
from roost.models.vocabulary import LookUp, rows_of, whole_logits

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# option -> the value that leaves the output as it is
_NEUTRAL: dict[str, object] = {
    "add_para_norm": False,  # norms before fc
    "norm_before_fc": False,
    "logit_scale": 1,
    "parallel_drafting": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Sizes and constants of a head."""

    layers: DecoderConfig  # its vocabulary is the target's
    target_hidden_size: int
    num_tokens: int  # of its own vocabulary
    layer_ids: tuple[int, ...] = ()  # layers of the target, counted as --draft-layer-ids says; empty: it names none
    norm_before_residual: bool = False  # the residual stream starts from the normed hidden state, not from itself

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        return self.layers.vocab_size


def read_eagle(fields: Fields) -> HeadConfig:
    """The head of a LlamaForCausalLMEagle."""
    _refuse_options(fields)
    fields.refuse_unless("hot_vocab_size")
    layers = read_config(fields)
    return HeadConfig(layers=layers, target_hidden_size=layers.hidden_size, num_tokens=layers.vocab_size)


def read_eagle3(fields: Fields) -> HeadConfig:
    """The head of a LlamaForCausalLMEagle3."""
    _refuse_options(fields)
    inner = fields.group("eagle_config")
    inner.refuse_unless("use_aux_hidden_state", True)
    layers = read_config(fields)
    if len(layers.layers) != 1:  # SGLang and vLLM read further layers in different ways
        raise fields.wrong("num_hidden_layers", f"must be 1 for an EAGLE-3 head, got {len(layers.layers)}")
    num_tokens = fields.integer("draft_vocab_size", layers.vocab_size)
    if num_tokens > layers.vocab_size:
        raise fields.wrong("draft_vocab_size", f"is {num_tokens}, more than the vocab_size, {layers.vocab_size}")
    return HeadConfig(
        layers=layers,
        target_hidden_size=fields.integer("target_hidden_size", layers.hidden_size),
        num_tokens=num_tokens,
        layer_ids=_layer_ids(fields, inner),
        norm_before_residual=fields.flag("norm_before_residual", False),
    )


class LastHiddenHead:
    """What heads share that read the target's last hidden states, and draft in its vocabulary by its LM head."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, layers: DecoderConfig, model: Model, weights: str, device: torch.device) -> None:
        layers = shard_config(layers, model.ops.group.size)
        self._config, self._model, self.dtype = layers, model, activation_dtype(weights, device)
        self._ops, self._stack = model.ops, Stack(layers, model.ops)
        self._frequency = frequencies(layers.layers[0].rope, layers.head_dim, device)

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The KV that each layer hands to `attend`."""
        return kv_shapes(self._config, self.dtype)

    @property
    def hidden_size(self) -> int:
        """Length of the hidden states it takes and gives."""
        return self._config.hidden_size

    @property
    def num_tokens(self) -> int:
        """Size of its vocabulary, which is the target's."""
        return self._config.vocab_size

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """The target's last hidden states, as they are."""
        assert not aux_hidden
        return last

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, by the target's own projection."""
        return self._model.logits(hidden)

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The same ids."""
        return draft_ids


class Eagle(LastHiddenHead):
    """An EAGLE-1 or EAGLE-2 head: one fully connected layer over both inputs, then layers of Llama."""

    def __init__(
        self, config: HeadConfig, state: Mapping[str, Tensor], model: Model, weights: str, device: torch.device
    ) -> None:
        super().__init__(config.layers, model, weights, device)
        layers, tensors = self._config, _tensors(state, device, self.dtype)
        tensors.drop_if(lambda name: name == "lm_head.weight")  # the target's is used, as SGLang does
        loader = Loader(layers, tensors, weights, model.ops)
        self._embed = _embedding(loader, model)
        self._fc = _fc(loader, tensors, layers.hidden_size, 2 * layers.hidden_size)
        self._layers = [
            loader.layer(f"layers.{number}.", 0, normed=number > 0)  # the first reads fc's output as it is
            for number in range(len(layers.layers))
        ]
        tensors.check_all_taken()

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size], as the target's last would be."""
        cos_sin = self._ops.cos_sin(positions, self._frequency, self.dtype)
        fused = self._ops.linear(self._ops.concat([self._embed(tokens), hidden]), self._fc)
        stream = Residual(fused)
        for number, layer in enumerate(self._layers):
            attended = fused if number == 0 else None  # the first layer has no norm in front
            stream = self._stack.run(layer, number, stream, cos_sin, attend, attended=attended)
        return stream.total()


class Eagle3:
    """An EAGLE-3 head: one layer whose attention reads embedding and hidden state side by side."""

    def __init__(
        self,
        config: HeadConfig,
        aux_layers: tuple[int, ...],
        state: Mapping[str, Tensor],
        model: Model,
        weights: str,
        device: torch.device,
    ) -> None:
        layers = shard_config(config.layers, model.ops.group.size)
        self.aux_layers = aux_layers
        self._config, self.dtype = replace(config, layers=layers), activation_dtype(weights, device)
        self._ops, self._stack = model.ops, Stack(layers, model.ops)
        tensors = _tensors(state, device, self.dtype)
        loader = Loader(layers, tensors, weights, model.ops)
        self._embed = _embedding(loader, model)
        self._fc = _fc(loader, tensors, layers.hidden_size, len(aux_layers) * config.target_hidden_size)
        self._layer = loader.layer("layers.0.", 0, in_len=2 * layers.hidden_size)
        self._hidden_norm = loader.norm("layers.0.hidden_norm.weight")
        self._norm = loader.norm("norm.weight")
        self._ids = _target_ids(config, tensors)
        self._head = self._projection(loader, tensors, model)
        tensors.check_all_taken()
        self._frequency = frequencies(layers.layers[0].rope, layers.head_dim, device)

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The KV that its layer hands to `attend`."""
        return kv_shapes(self._config.layers, self.dtype)

    @property
    def hidden_size(self) -> int:
        """Length of the hidden states it takes and gives."""
        return self._config.layers.hidden_size

    @property
    def num_tokens(self) -> int:
        """Size of its own vocabulary."""
        return self._config.num_tokens

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """One hidden state from the auxiliary ones: [num_tokens, hidden_size]."""
        return self._ops.linear(self._ops.concat(aux_hidden), self._fc)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size], before the final norm."""
        eps, norm = self._config.layers.norm_eps, self._ops.norm
        cos_sin = self._ops.cos_sin(positions, self._frequency, self.dtype)
        normed = norm(hidden, self._hidden_norm, eps)
        both = self._ops.concat([norm(self._embed(tokens), self._layer.first_norm, eps), normed])
        residual = normed if self._config.norm_before_residual else hidden
        return self._stack.run(self._layer, 0, Residual(residual), cos_sin, attend, attended=both).total()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token in its own vocabulary."""
        return self._ops.norm_linear(Residual(hidden), self._norm, self._config.layers.norm_eps, self._head)[1]

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of its own."""
        return draft_ids if self._ids is None else self._ops.look_up(self._ids, draft_ids)

    def _projection(self, loader: Loader, tensors: Tensors, model: Model) -> Linear:
        """Its own head, or the target's where it has none and that fits."""
        config = self._config
        if tensors.has("lm_head.weight"):
            return whole_logits(loader.head(config.num_tokens), config.num_tokens, self._ops)
        if config.layers.tied:
            raise ConfigError("config.json: tie_word_embeddings is True without an lm_head, which is not supported")
        if self._ids is not None or config.num_tokens != model.traits.vocab_size:
            raise ConfigError(
                f"it has no lm_head.weight, and its vocabulary of {config.num_tokens} tokens is not the target's of "
                f"{model.traits.vocab_size}, whose head could be used"
            )
        if config.layers.hidden_size != model.hidden_size:
            raise ConfigError(
                f"it has no lm_head.weight, and its hidden size {config.layers.hidden_size} is not the target's, "
                f"{model.hidden_size}, whose head could be used"
            )
        return model.logits


def _refuse_options(fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        fields.refuse_unless(name)
    for name, value in _NEUTRAL.items():
        fields.refuse_unless(name, value)


def _layer_ids(fields: Fields, inner: Fields) -> tuple[int, ...]:
    """Layers of the target as a config gives them, at its top level or in eagle_config; an empty list says nothing."""
    found = {ids for group in (fields, inner) if group.has(LAYER_IDS) and (ids := group.integers(LAYER_IDS))}
    if len(found) > 1:
        raise fields.wrong(LAYER_IDS, "and eagle_config's are both there and differ; which one counts is unclear")
    return found.pop() if found else ()


def _tensors(state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Tensors:
    tensors = Tensors(state, device, dtype)
    tensors.drop_if(lambda name: name.endswith("rotary_emb.inv_freq"))  # follows from the config
    return tensors


def _embedding(loader: Loader, model: Model) -> LookUp:
    """Its own embedding of the target's tokens, or the target's, scaled as the target scales it."""
    layers, tensors = loader.config, loader.tensors
    if tensors.has("embed_tokens.weight"):
        own = tensors.take("embed_tokens.weight", loader.split(layers.vocab_size), layers.hidden_size)
        return rows_of(own, None, layers.vocab_size, model.ops)
    if layers.hidden_size != model.hidden_size:
        raise ConfigError(
            f"it has no embed_tokens.weight, and its hidden size {layers.hidden_size} is not the target's, "
            f"{model.hidden_size}, whose embedding could be used"
        )
    return model.embed


def _fc(loader: Loader, tensors: Tensors, out_len: int, in_len: int) -> Linear:
    """The projection that makes one hidden state of several; only the tensors say whether it has a bias."""
    return loader.linear(("fc",), (out_len,), in_len, bias=tensors.has("fc.bias"))


def _target_ids(config: HeadConfig, tensors: Tensors) -> Tensor | None:
    """The target's id of each token of the head: [num_tokens]; None where they are the same."""
    num_tokens, vocab_size = config.num_tokens, config.layers.vocab_size
    ids = torch.arange(num_tokens)
    if tensors.has("d2t") or num_tokens < vocab_size:
        ids = ids + tensors.take_integers("d2t", num_tokens).cpu()  # d2t holds differences of ids
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ConfigError(f"d2t maps to token {int(wrong[0])}, outside the vocabulary of {vocab_size}")
    if len(ids.unique()) < num_tokens:
        raise ConfigError("d2t maps two tokens to the same one")
    if tensors.has("t2d"):
        marks = tensors.take_integers("t2d", vocab_size).cpu() != 0
        if int(marks.sum()) != num_tokens or not bool(marks[ids].all()):
            raise ConfigError(f"t2d marks {int(marks.sum())} tokens, d2t maps to {num_tokens}: they must be the same")
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids.to(tensors.device)


def _load_eagle(
    config: HeadConfig,
    aux_layers: tuple[int, ...],
    state: Mapping[str, Tensor],
    model: Model,
    weights: str,
    device: torch.device,
) -> Eagle:
    assert not aux_layers, "it reads the last hidden states"
    return Eagle(config, state, model, weights, device)


EAGLE = HeadFamily(read_config=read_eagle, load=_load_eagle)
EAGLE3 = HeadFamily(read_config=read_eagle3, load=Eagle3)
