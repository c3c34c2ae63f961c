"""The decoder that most families share: pre-norm layers of attention and a feed-forward, over a flat batch.

Holds weights; keeps nothing of a batch. Draft heads are made of the same layers. Loaded by families, called by the
forward passes.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from roost.config.resolved import ModelTraits
from roost.layers.attention import Attend
from roost.layers.convolution import Convolves
from roost.layers.linear import activation_dtype
from roost.layers.ops import TORCH_OPS, DirectPass, Ops, Residual
from roost.layers.rotary import CosSin, frequencies
from roost.models.decoder_layers import DecoderConfig, FeedNorms, Layer, LayerKind, Loader
from roost.models.model import KvShape, traits_of
from roost.models.shards import shard_config
from roost.models.tensors import Tensors
from roost.models.vocabulary import rows_of, whole_logits


class Stack:
    """Runs layers: each reads the residual stream and adds to it."""

    def __init__(self, config: DecoderConfig, ops: Ops) -> None:
        self._config = config
        self._ops = ops

    def run(
        self,
        layer: Layer,
        number: int,
        stream: Residual,
        cos_sin: CosSin,
        attend: Attend,
        *,
        attended: Tensor | None = None,
        told: Tensor | None = None,
        next_norm: Tensor | None = None,
    ) -> Residual:
        """The stream behind a layer; its attention reads the stream's norm, unless it is told to read `attended`.

        `told` is what tokens tell the layer by itself, if they do; `next_norm` the weight of the norm that reads the
        stream next, where it is known.
        """
        ops, eps = self._ops, self._config.norm_eps
        if layer.delta is not None and layer.delta.rates is not None:
            hidden, normed = ops.add_norm(stream, layer.first_norm, eps)
            heads = layer.delta.project(normed, layer.qkv, ops)
        elif attended is None:
            hidden, heads = ops.norm_linear(stream, layer.first_norm, eps, layer.qkv)
        else:
            hidden, heads = stream.total(), ops.linear(attended, layer.qkv)
        mixed, norms = self._mixed(layer, number, heads, cos_sin, attend), layer.feed_norms(next_norm)
        if layer.norm_after_attention is None:
            return self._ended(layer, ops.linear_add(mixed, layer.out, hidden, norms.before), norms, told)
        added = ops.norm(ops.linear(mixed, layer.out), layer.norm_after_attention, eps)
        return self._ended(layer, Residual(hidden, added), norms, told)

    def _ended(self, layer: Layer, stream: Residual, norms: FeedNorms, told: Tensor | None) -> Residual:
        """What a layer makes of the stream behind attention."""
        stream = layer.feed_forward(stream, norms)
        if layer.input_gate is not None:
            assert told is not None
            stream = layer.input_gate.add_to(stream, told, self._ops, self._config.activation)
        return stream if layer.scale == 1.0 else Residual(self._ops.scaled_sum(stream, layer.scale))

    def _mixed(self, layer: Layer, number: int, projected: Tensor, cos_sin: CosSin, attend: Attend) -> Tensor:
        """What a token takes from those before it, from what was projected of each."""
        config, ops = self._config, self._ops
        if layer.conv is not None:
            assert isinstance(attend, Convolves), attend
            before, behind, inputs = projected.chunk(3, dim=-1)
            weight, bias = layer.conv
            mixed = attend.convolve(number, before * inputs, weight)
            return behind * (mixed if bias is None else mixed + bias)
        if layer.delta is not None:
            return layer.delta.mixed(number, projected, attend, ops, config.norm_eps)
        heads = projected.unflatten(-1, (-1, layer.heads.head_dim))  # queries, then keys, then values
        num_kv_heads = layer.heads.num_kv_heads if layer.keeps_kv else 0
        qk = heads[:, : config.num_heads + num_kv_heads]
        if layer.order is not None:
            qk = projected.index_select(1, layer.order).unflatten(-1, (-1, layer.heads.head_dim))
        value = heads[:, -num_kv_heads:] if layer.keeps_kv else None  # the keys again, where nothing else is there
        if layer.qk_norm is not None:
            qk = ops.norm(qk, layer.qk_norm, config.norm_eps)
        if layer.value_norm is not None and value is not None:
            value = ops.norm(value, layer.value_norm, config.norm_eps)
        read = attend(number, qk, value, cos_sin, layer.sinks)
        if config.out_gate:
            read = read * heads[:, 1 : 2 * config.num_heads : 2].sigmoid()
        return read.flatten(1)


def kv_shapes(config: DecoderConfig, dtype: torch.dtype) -> tuple[KvShape, ...]:
    """The KV of each layer that keeps some, as `attend` counts them."""
    inputs = KvShape(num_kv_heads=1, head_dim=config.hidden_size, scale=1.0, dtype=dtype, has_values=False)

    def shape_of(kind: LayerKind) -> KvShape:
        if kind.delta is not None:
            return replace(inputs, head_dim=kind.delta.input_len, recurs=kind.delta)
        if kind.conv_len is not None:
            return replace(inputs, head_dim=config.hidden_size // config.ranks, window=kind.conv_len)
        heads = config.heads_of(kind)
        return replace(
            inputs,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            scale=heads.scale,
            window=kind.window,
            has_values=True,
        )

    return tuple(shape_of(kind) for kind in config.layers if kind.shares is None)


class Decoder:
    """A checkpoint on a device."""

    def __init__(
        self,
        config: DecoderConfig,
        state: Mapping[str, Tensor],
        weights: str,
        device: torch.device,
        ops: Ops = TORCH_OPS,
    ) -> None:
        # a collective cannot be recorded with what is around it
        self.ops = ops = ops if ops.group.size == 1 else replace(ops, new_pass=DirectPass)
        self.config = config = shard_config(config, ops.group.size)
        self._stack = Stack(config, ops)
        self.dtype = activation_dtype(weights, device)
        rotations = [(kind.rope, config.heads_of(kind).head_dim) for kind in config.layers]
        ropes = list(dict.fromkeys(rotations))
        tensors = Tensors(state, device, self.dtype)
        tensors.drop_if(lambda name: name.endswith(".rotary_emb.inv_freq"))  # follows from the config
        tensors.drop_if(lambda name: name.startswith(config.names.others))
        loader = Loader(config, tensors, weights, ops)
        embed = loader.embedding(f"{config.names.root}embed_tokens.weight", config.vocab_size)
        self._layers = [
            loader.layer(f"{config.names.root}layers.{number}.", ropes.index(rotations[number]), kind=kind)
            for number, kind in enumerate(config.layers)
        ]
        self._norm = loader.norm(f"{config.names.root}{config.names.last_norm}.weight")
        if config.tied:
            tensors.drop_if(lambda name: name == "lm_head.weight")  # a copy of the embedding, where there is one
        head = loader.head(config.vocab_size, embed if config.tied else None)
        self._head = whole_logits(head, config.vocab_size, ops)
        self._rows = rows_of(embed, head if config.tied else None, config.vocab_size, ops)
        self._inputs = None if config.input_len is None else loader.layer_inputs(config.input_len)
        tensors.check_all_taken()
        self._frequencies = [frequencies(rope, head_dim, device) for rope, head_dim in ropes]
        # rounded as the embedding is, since its rows are what it scales
        self._embed_scale = float(torch.tensor(config.embed_scale).to(self.dtype))

    @property
    def traits(self) -> ModelTraits:
        """What its layers need of the KV plane."""
        config = self.config
        return traits_of(self.kv, vocab_size=config.vocab_size, context_max=config.context_max, sinks=config.sinks)

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The KV of each layer that keeps some, as `attend` counts them."""
        return kv_shapes(self.config, self.dtype)

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        """Length of its hidden states."""
        return self.config.hidden_size

    @property
    def activation_width(self) -> int:
        """What a feed-forward makes of a token, a hidden state, or what is projected in front of a recurrence."""
        config = self.config
        told = config.num_layers * (config.input_len or 0)
        deltas = [kind.delta.projected_len for kind in config.layers if kind.delta is not None]
        return max(config.feed_width, config.hidden_size, told, *deltas)

    def embed(self, tokens: Tensor) -> Tensor:
        """Inputs of the first layer: [num_tokens, hidden_size]."""
        return self.ops.scaled_sum(Residual(self._rows(tokens)), self._embed_scale)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [num_tokens, hidden_size] of a flat batch."""
        return self.forward_with_aux(tokens, positions, attend, ())[0]

    def forward_with_aux(
        self, tokens: Tensor, positions: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Last hidden states, and those at the inputs of the layers in `aux_layers`, in its order.

        The number of layers stands for what the last one puts out, before the final norm.
        """
        num_layers, kv_numbers = len(self._layers), self.config.kv_numbers
        assert all(0 <= number <= num_layers for number in aux_layers), aux_layers
        cos_sin = [self.ops.cos_sin(positions, frequency, self.dtype) for frequency in self._frequencies]
        embedded, inputs = self.embed(tokens), dict[int, Tensor]()
        stream, told = Residual(embedded), None if self._inputs is None else self._inputs.of(tokens, embedded, self.ops)
        norms = [layer.first_norm for layer in self._layers] + [self._norm]
        for number, layer in enumerate(self._layers):
            if number in aux_layers:
                stream = stream if stream.added is None else Residual(stream.total())
                inputs[number] = stream.hidden
            rotation = cos_sin[layer.rope]
            kv, next_norm = kv_numbers[number], norms[number + 1]
            own = None if told is None else told[:, number]
            stream = self._stack.run(layer, kv, stream, rotation, attend, told=own, next_norm=next_norm)
        inputs[num_layers], normed = self.ops.add_norm(stream, self._norm, self.config.norm_eps)
        return normed, tuple(inputs[number] for number in aux_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token: [num_tokens, vocab_size]."""
        logits = self.ops.linear(hidden, self._head)
        if self.config.logit_cap is not None:
            self.ops.soft_cap(logits, self.config.logit_cap)
        return logits
