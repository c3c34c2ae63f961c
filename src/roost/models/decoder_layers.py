"""Layers of a decoder: what a config says of them, what a layer holds, and how it is made of a checkpoint's tensors.

What differs between families is a field of `DecoderConfig`; the feed-forward is a function that the family chooses.
Projections that read the same input are stacked at load, since each operation costs a decode step on the host. Loaded
from Hugging Face's tensor names; computes nothing but feed-forwards. Called by the decoder and by draft heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.gated_delta import DeltaShape, DeltaWeights
from roost.layers.linear import PLAIN_FORMS, Linear, embeds, make_linear
from roost.layers.ops import ACTIVATIONS, Ops, Residual
from roost.layers.quantised import QuantisedWeight
from roost.layers.rotary import Rope, rotated_order
from roost.models.gated_delta import DeltaMixer
from roost.models.layer_inputs import InputGate, LayerInputs
from roost.models.parts import Length, Shape, part, split
from roost.models.tensor_names import NormNames, TensorNames
from roost.models.tensors import Tensors
from roost.models.vocabulary import rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedNorms:
    """Weights of the norms around a feed-forward."""

    before: Tensor
    after: Tensor | None  # None: what it says is added as it is
    next: Tensor | None  # through which the stream is read next; None: that is not known


FeedForward = Callable[[Residual, FeedNorms], Residual]  # reads the residual stream through a norm, and adds to it
MakeFeedForward = Callable[["Loader", str], FeedForward]  # from the tensors of the layer with this prefix


def gated_feed_forward(loader: "Loader", prefix: str, width: int | None = None) -> FeedForward:
    """down(activation(gate(x)) * up(x)), as Llama has it; of the config's width unless told."""
    config, ops = loader.config, loader.ops
    hidden, wide = config.hidden_size, loader.split(width or config.intermediate_size)
    gate, up, down = (f"{prefix}{name}" for name in (config.names.gate, config.names.up, config.names.down))
    project_in = loader.linear((gate, up), (wide, wide), hidden, bias=False, is_gated=True)
    project_out = loader.summed(loader.linear((down,), (hidden,), wide, bias=False))

    def feed_forward(stream: Residual, norms: FeedNorms) -> Residual:
        total, gated = ops.norm_gate_up(stream, norms.before, config.norm_eps, project_in, config.activation)
        if norms.after is None:
            return ops.linear_add(gated, project_out, total, norms.next)
        return Residual(total, ops.norm(ops.linear(gated, project_out), norms.after, config.norm_eps))

    return feed_forward


def feed_forward_of_normed(loader: "Loader", said_of: Callable[[Tensor], Tensor]) -> FeedForward:
    """A feed-forward from a function: of normed hidden states, what is added to the hidden states."""
    ops, eps = loader.ops, loader.config.norm_eps

    def feed_forward(stream: Residual, norms: FeedNorms) -> Residual:
        hidden, normed = ops.add_norm(stream, norms.before, eps)
        said = said_of(normed)
        return Residual(hidden, said if norms.after is None else ops.norm(said, norms.after, eps))

    return feed_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of keys and values, and how they are read."""

    num_kv_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    copies: int = 1  # ranks that keep the same KV heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What may differ from layer to layer."""

    rope: Rope
    window: int | None = None  # tokens the layer sees, the current one included; None: all
    heads: Heads | None = None  # None: those that the config names for all
    values_are_keys: bool = False  # values are what keys are before norm and rotation
    shares: int | None = None  # the layer whose KV it reads, by its number; None: it keeps KV of its own
    feed_forward: "MakeFeedForward | None" = None  # None: the one that the config names for all
    conv_len: int | None = None  # a short convolution over so many tokens in place of attention
    delta: DeltaShape | None = None  # a gated delta rule in its place

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.conv_len is None and self.delta is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """A gated feed-forward, or several that a token goes through side by side, as experts."""

    width: int
    active: int = 1

    def len_max(self, hidden_size: int, ranks: int) -> int:
        """The longest vector that each of some ranks makes of one token."""
        return self.active * max(2 * self.width // ranks, hidden_size if self.active > 1 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_max: int  # positions it was made for
    layers: tuple[LayerKind, ...]
    scale: float  # of the products of queries and keys
    norm_eps: float
    tied: bool  # the head is the embedding
    activation: str = "silu"
    feed_forward: MakeFeedForward = gated_feed_forward
    feeds: tuple[Feed, ...] = ()  # what its layers have besides one of the intermediate size
    qkv_bias: bool = False
    out_bias: bool = False  # of the projection behind attention
    qk_norm: bool = False  # queries and keys normed head by head, before rotation
    value_norm: bool = False  # values, too, by a norm without a weight
    sinks: bool = False  # each head has a learned score that joins the sum of weights and stands for no key
    out_gate: bool = False  # behind each head's query stands a gate for what the head reads
    conv_bias: bool = False  # of a short convolution, and of the projections around it
    names: TensorNames = TensorNames()
    norms: NormNames = NormNames()
    norm_offset: float = 0.0  # added to the norm weights of a checkpoint
    embed_scale: float = 1.0
    input_len: int | None = None  # numbers that a token tells each layer by itself; None: it tells none
    layer_scales: bool = False  # what a layer puts out is scaled by a number of its own
    logit_cap: float | None = None  # logits are held below it by a tanh; None: they are not
    ranks: int = 1  # that share the model: heads and recurrences are then those of one of them, the rest of all

    @property
    def num_layers(self) -> int:
        """How many layers it has."""
        return len(self.layers)

    @property
    def kv_numbers(self) -> tuple[int, ...]:
        """The KV that each layer reads, by the number that `attend` has for it: layers that keep KV are counted."""
        keeping = [number for number, kind in enumerate(self.layers) if kind.shares is None]
        owners = [number if kind.shares is None else kind.shares for number, kind in enumerate(self.layers)]
        return tuple(map(keeping.index, owners))

    @property
    def feed_width(self) -> int:
        """The longest vector that a feed-forward makes of one token."""
        feeds = (Feed(width=self.intermediate_size), *self.feeds)
        return max(each.len_max(self.hidden_size, self.ranks) for each in feeds)

    def heads_of(self, kind: LayerKind) -> Heads:
        """The heads of a layer.

        Where all of a head rotates, queries and keys may stay as short as they are: their products grow instead.
        """
        heads = kind.heads or Heads(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, scale=self.scale)
        return heads if kind.rope.rotated_len else replace(heads, scale=heads.scale * kind.rope.length**2)

    def __post_init__(self) -> None:
        for heads in dict.fromkeys(map(self.heads_of, self.layers)):
            if self.num_heads % heads.num_kv_heads:
                raise ConfigError(
                    f"the model's {self.num_heads} heads do not share {heads.num_kv_heads} KV heads evenly"
                )
            if heads.head_dim % 2:
                raise ConfigError(f"the model's head_dim must be even for rotary positions, got {heads.head_dim}")
        if self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise ConfigError(f"the model's activation {self.activation} is not known; known are {known}")
        windows = {layer.conv_len or layer.window for layer in self.layers} - {None}
        if len(windows) > 1:
            raise ConfigError(
                f"the model's layers have windows of different lengths: {windows}; one length is supported"
            )
        self._check_kv()

    def _check_kv(self) -> None:
        """Refuse KV that no cache could keep, and that a layer could not read."""
        kept = {
            (kind.conv_len or kind.window, kind.conv_len or self.heads_of(kind))
            for kind in self.layers
            if kind.shares is None and kind.delta is None
        }
        if len({kind.delta for kind in self.layers} - {None}) > 1:
            raise ConfigError("the model's gated delta rules have sizes of several kinds; one is supported")
        if len(kept) > len({window for window, _ in kept}):
            raise ConfigError("the model's layers with one window have KV heads of different numbers or sizes")
        for number, kind in enumerate(self.layers):
            if kind.shares is None:
                continue
            owner = self.layers[kind.shares]
            alike = [(each.rope, each.window, self.heads_of(each), each.conv_len) for each in (kind, owner)]
            if kind.shares >= number or owner.shares is not None or alike[0] != alike[1]:
                raise ConfigError(f"the model's layer {number} cannot read the KV of layer {kind.shares}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights; norms are float32."""

    norm_before_attention: Tensor | None  # None: attention reads the input as it is
    qkv: Linear  # of a convolution: gate in front of it, gate behind it, input
    conv: tuple[Tensor, Tensor | None] | None  # [hidden_size, conv_len] and bias; None: it has none
    delta: DeltaMixer | None  # what a gated delta rule computes; None: it has none
    order: Tensor | None  # which of the projected numbers are queries and keys, in that order; None: the first ones
    heads: Heads
    keeps_kv: bool  # False: it projects queries alone
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim], or of queries alone
    value_norm: Tensor | None  # [head_dim]
    sinks: Tensor | None  # [num_heads]
    out: Linear
    norm_after_attention: Tensor | None
    norm_before_feed: Tensor
    feed_forward: FeedForward
    norm_after_feed: Tensor | None
    input_gate: InputGate | None  # through which it reads what tokens tell it by itself
    scale: float  # of what it puts out
    rope: int  # which of the model's

    @property
    def first_norm(self) -> Tensor:
        """The norm of what attention reads, which every layer of a model has."""
        assert self.norm_before_attention is not None
        return self.norm_before_attention

    def feed_norms(self, next_norm: Tensor | None) -> FeedNorms:
        """The norms around the feed-forward; `next_norm` is the first behind the layer."""
        is_last = self.input_gate is None and self.scale == 1.0
        following = next_norm if is_last else None
        return FeedNorms(before=self.norm_before_feed, after=self.norm_after_feed, next=following)


class Loader:
    """Makes layers of tensors."""

    def __init__(self, config: DecoderConfig, tensors: Tensors, weights: str, ops: Ops) -> None:
        self.config = config
        self.ops = ops
        self.tensors = tensors
        self.weights = weights
        self._orders: dict[LayerKind, Tensor] = {}  # the same for all layers of a kind

    def layer(
        self,
        prefix: str,
        rope: int,
        *,
        in_len: int | None = None,
        normed: bool = True,
        kind: LayerKind | None = None,
    ) -> Layer:
        """The layer whose tensors are named `prefix`…; `rope` is its number among the model's.

        Attention reads `in_len` numbers a token, those of the hidden state unless told; not `normed`, it has no norm.
        Of no certain kind, it has attention and the feed-forward that the config names.
        """
        config, norms, hidden = self.config, self.config.norms, self.config.hidden_size
        kind = kind or LayerKind(rope=config.layers[0].rope, heads=config.layers[0].heads)
        conv_len, delta = kind.conv_len, kind.delta
        if delta is not None:
            qkv, out = self._around_delta(prefix, delta)
        else:
            qkv, out = self._around_conv(prefix) if conv_len else self._attention(prefix, in_len or hidden, kind)
        return Layer(
            norm_before_attention=self._extra_norm(prefix, norms.before_attention if normed else None),
            qkv=qkv,
            conv=None if conv_len is None else self._conv(prefix, conv_len),
            delta=None if delta is None else self._delta(prefix, delta),
            order=self._order(kind) if kind.attends else None,
            heads=config.heads_of(kind),
            keeps_kv=kind.shares is None,
            qk_norm=self._qk_norm(prefix, kind) if config.qk_norm and kind.attends else None,
            value_norm=self._value_norm(kind) if config.value_norm and kind.attends else None,
            sinks=self._sinks(prefix) if config.sinks and kind.attends else None,
            out=out,
            norm_after_attention=self._extra_norm(prefix, norms.after_attention),
            norm_before_feed=self.norm(f"{prefix}{norms.before_feed}.weight"),
            feed_forward=(kind.feed_forward or config.feed_forward)(self, prefix),
            norm_after_feed=self._extra_norm(prefix, norms.after_feed),
            input_gate=None if config.input_len is None else self._input_gate(prefix, config.input_len),
            scale=float(self.tensors.take(f"{prefix}layer_scalar", 1)) if config.layer_scales else 1.0,
            rope=rope,
        )

    def _attention(self, prefix: str, in_len: int, kind: LayerKind) -> tuple[Linear, Linear]:
        """The projections in front of attention and behind it."""
        if kind.rope.rotated_len and kind.rope.length != 1 and not self.config.qk_norm:
            raise ConfigError("the model's attention_factor is for a part of each head, and heads have no norm for it")
        config, names, heads = self.config, self.config.names, self.config.heads_of(kind)
        query_len, kv_len = config.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        q, k, v, out = (f"{prefix}{name}" for name in (names.query, names.key, names.value, names.out))
        number = 1 if kind.shares is not None else 2 if kind.values_are_keys else 3
        kv = part(kv_len, self.ops.group.rank // heads.copies, self.ops.group.size // heads.copies)
        lengths = (self.part(query_len * (1 + config.out_gate)), kv, kv)[:number]
        return (
            self.linear((q, k, v)[:number], lengths, in_len, bias=config.qkv_bias),
            self.summed(self.linear((out,), (config.hidden_size,), self.part(query_len), bias=config.out_bias)),
        )

    def _around_conv(self, prefix: str) -> tuple[Linear, Linear]:
        """The same of a short convolution."""
        hidden, bias = self.config.hidden_size, self.config.conv_bias
        own = hidden // self.config.ranks
        return (
            self.linear((f"{prefix}conv.in_proj",), (self.part(3 * own, (own, own, own)),), hidden, bias=bias),
            self.summed(self.linear((f"{prefix}conv.out_proj",), (hidden,), self.part(own), bias=bias)),
        )

    def _conv(self, prefix: str, conv_len: int) -> tuple[Tensor, Tensor | None]:
        """The weight of a short convolution, and its bias."""
        channels, name = self.split(self.config.hidden_size), f"{prefix}conv.conv"
        weight = self.convolution(name, channels, conv_len)
        return weight, self.tensors.take(f"{name}.bias", channels) if self.config.conv_bias else None

    def convolution(self, name: str, num_channels: Length, conv_len: int) -> Tensor:
        """A convolution's weight, channel by channel: [num_channels, conv_len]."""
        return self.tensors.take(f"{name}.weight", num_channels, 1, conv_len).squeeze(1)

    def _around_delta(self, prefix: str, shape: DeltaShape) -> tuple[Linear, Linear]:
        """The same of a gated delta rule."""
        hidden, prefix = self.config.hidden_size, f"{prefix}{self.config.names.delta}"
        values, heads = self.part(shape.value_len), self.part(shape.num_value_heads)
        parts = [("qkv", self._channels(shape)), ("a", heads), ("b", heads), ("z", values)]
        if self.weights not in PLAIN_FORMS:  # how much is forgotten and learned stays in floats
            del parts[1:3]
        names = tuple(f"{prefix}in_proj_{name}" for name, _ in parts)
        return (
            self.linear(names, tuple(length for _, length in parts), hidden, bias=False),
            self.summed(self.linear((f"{prefix}out_proj",), (hidden,), values, bias=False)),
        )

    def _channels(self, shape: DeltaShape) -> Length:
        """Those of queries, keys and values."""
        return self.part(shape.num_channels, (shape.key_len, shape.key_len, shape.value_len))

    def _delta(self, prefix: str, shape: DeltaShape) -> DeltaMixer:
        """What is between them."""
        prefix, heads = f"{prefix}{self.config.names.delta}", self.part(shape.num_value_heads)
        norm = self.tensors.take(f"{prefix}norm.weight", shape.value_dim, dtype=torch.float32)
        names = (f"{prefix}in_proj_a.weight", f"{prefix}in_proj_b.weight")
        return DeltaMixer(
            weights=DeltaWeights(
                shape=shape,
                conv=self.convolution(f"{prefix}conv1d", self._channels(shape), shape.conv_len).t().contiguous(),
                decay=-self.tensors.take(f"{prefix}A_log", heads, dtype=torch.float32).exp(),
                forget_bias=self.tensors.take(f"{prefix}dt_bias", heads, dtype=torch.float32),
            ),
            rates=None if self.weights in PLAIN_FORMS else self.floats(names, heads),
            norm=norm.expand(shape.num_value_heads, -1).contiguous(),
        )

    def part(self, own: int, sections: tuple[int, ...] = ()) -> Length:
        """This rank's part of what each rank has `own` of."""
        return part(own, self.ops.group.rank, self.ops.group.size, sections)

    def split(self, whole: int) -> Length:
        """This rank's part of `whole`."""
        return split(whole, self.ops.group.rank, self.ops.group.size)

    def linear(
        self, names: tuple[str, ...], out_lens: Shape, in_len: Length, *, bias: bool, is_gated: bool = False
    ) -> Linear:
        """One projection of several that read the same input; `is_gated`: it is read by `Ops.norm_gate_up` alone.

        Of a part of the inputs it gives this rank's share of a sum, to which one rank adds the bias.
        """
        weight = self.tensors.take_projection(tuple(f"{name}.weight" for name in names), out_lens, in_len)
        biases = tuple(f"{name}.bias" for name in names)
        added = self.tensors.take_stacked(biases, out_lens) if bias else None
        if not isinstance(in_len, int) and self.ops.group.rank:
            added = None
        return self.ops.keep(make_linear(weight, added, self.tensors.form_of(weight, self.weights)), is_gated)

    def summed(self, project: Linear) -> Linear:
        """A projection by parts of the inputs, as the sum over all ranks."""
        ops = self.ops
        return project if ops.group.size == 1 else lambda x: ops.group.all_reduce(ops.linear(x, project))

    def floats(self, names: tuple[str, ...], out_len: Length, bias: str | None = None) -> Linear:
        """A projection of hidden states to `out_len` numbers a name, by floats whatever form the other weights have."""
        weight = self.tensors.take_stacked(names, (out_len,) * len(names), self.config.hidden_size)
        added = None if bias is None else self.tensors.take(bias, len(weight))
        return make_linear(weight, added, "fp32" if weight.dtype == torch.float32 else "bf16")

    def layer_inputs(self, input_len: int) -> LayerInputs:
        """What makes the inputs that each layer has for itself."""
        config, root, size = self.config, self.config.names.root, self.config.num_layers * input_len
        table = self.embedding(f"{root}embed_tokens_per_layer.weight", config.vocab_size, size)
        return LayerInputs(
            rows=rows_of(table, None, config.vocab_size, self.ops),
            project=self.linear((f"{root}per_layer_model_projection",), (size,), config.hidden_size, bias=False),
            # the table's rows count sqrt(input_len) times; the projection's outputs hidden_size^-0.5 times
            norm=self.norm(f"{root}per_layer_projection_norm.weight", input_len) * input_len**-0.5,
            eps=config.norm_eps * config.hidden_size,
        )

    def _input_gate(self, prefix: str, input_len: int) -> InputGate:
        hidden = self.config.hidden_size
        return InputGate(
            gate=self.linear((f"{prefix}per_layer_input_gate",), (input_len,), hidden, bias=False),
            out=self.linear((f"{prefix}per_layer_projection",), (hidden,), input_len, bias=False),
            norm=self.norm(f"{prefix}post_per_layer_input_norm.weight"),
            eps=self.config.norm_eps * 2 / input_len,  # see `LayerInputs`
        )

    def embedding(self, name: str, num_tokens: int, size: int | None = None) -> Tensor | QuantisedWeight:
        """The embedding of so many tokens: floats, unless its form can be looked up as it is stored.

        Its rows are as long as the hidden state unless told; a rank has those of its part of the tokens.
        """
        tokens, size = self.split(num_tokens), size or self.config.hidden_size
        if embeds(self.weights, self.tensors.device):
            return self.tensors.take_projection((name,), (tokens,), size)
        return self.tensors.take(name, tokens, size)

    def head(self, num_tokens: int, tied: Tensor | QuantisedWeight | None = None) -> Linear:
        """The LM head: from hidden states to the logits of so many tokens, of which a rank has its part.

        `tied` is the embedding where that is the head.
        """
        tokens, size = self.split(num_tokens), self.config.hidden_size
        weight = self.tensors.take_projection(("lm_head.weight",), (tokens,), size) if tied is None else tied
        form = self.tensors.form_of(weight, self.weights, is_head=True)
        return self.ops.keep(make_linear(weight, None, form), False)

    def norm(self, name: str, length: int | None = None) -> Tensor:
        """A norm's weight, as long as the hidden state unless told."""
        weight = self.tensors.take(name, length or self.config.hidden_size, dtype=torch.float32)
        return weight + self.config.norm_offset

    def _extra_norm(self, prefix: str, name: str | None) -> Tensor | None:
        return None if name is None else self.norm(f"{prefix}{name}.weight")

    def _qk_norm(self, prefix: str, kind: LayerKind) -> Tensor:
        config, heads = self.config, self.config.heads_of(kind)
        query = self.norm(f"{prefix}{config.names.query_norm}.weight", heads.head_dim).expand(config.num_heads, -1)
        both = query.contiguous()
        if kind.shares is None:
            key = self.norm(f"{prefix}{config.names.key_norm}.weight", heads.head_dim)
            both = torch.cat([query, key.expand(heads.num_kv_heads, -1)])
        if (rotated_len := kind.rope.rotated_len) is None:
            return both
        both[:, :rotated_len] *= kind.rope.length  # here, since what does not rotate stays as long as it is
        return both[:, rotated_order(rotated_len, heads.head_dim)]

    def _sinks(self, prefix: str) -> Tensor:
        heads = self.part(self.config.num_heads)
        return self.tensors.take(f"{prefix}{self.config.names.sinks}", heads, dtype=torch.float32)

    def _value_norm(self, kind: LayerKind) -> Tensor:
        return torch.ones(self.config.heads_of(kind).head_dim, device=self.tensors.device)

    def _order(self, kind: LayerKind) -> Tensor | None:
        """Which of the projected numbers are queries and keys, where these do not come first, or not as they rotate."""
        heads, num_heads, rotated_len = self.config.heads_of(kind), self.config.num_heads, kind.rope.rotated_len
        if not self.config.out_gate and rotated_len is None:
            return None
        if kind not in self._orders:
            step, num_keys = 1 + self.config.out_gate, 0 if kind.shares is not None else heads.num_kv_heads
            firsts = [*range(0, step * num_heads, step), *range(step * num_heads, step * num_heads + num_keys)]
            dims = torch.tensor(rotated_order(rotated_len or heads.head_dim, heads.head_dim))
            order = (torch.tensor(firsts)[:, None] * heads.head_dim + dims).flatten()
            self._orders[kind] = order.to(self.tensors.device)
        return self._orders[kind]
