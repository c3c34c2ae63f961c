"""The experts of a layer, made of a checkpoint's tensors: however these are named and lie.

Published checkpoints have a tensor for each expert's matrix, or all of a layer in one; gpt-oss has the matrices the
other way round, with biases. Experts are kept side by side where their form is plain, since kernels read them so; a
backend that needs that refuses other forms. Called by whoever makes a feed-forward of experts.
"""

from torch import Tensor

from roost.errors import ConfigError
from roost.layers.experts import Experts
from roost.layers.linear import PLAIN_FORMS, Linear, make_linear
from roost.layers.ops import TORCH_OPS
from roost.models.decoder_layers import Loader


def load_experts(loader: Loader, prefix: str, number: int, width: int) -> Experts:
    """Experts whose tensors are named `prefix.0.gate_proj.weight`…, or stand side by side in two tensors."""
    return _checked(loader, _experts(loader, prefix, number, width))


def load_woven_experts(loader: Loader, prefix: str, number: int, width: int, activation: str) -> Experts:
    """Experts as gpt-oss has them: matrices the other way round, gates and ups in turn, biases."""
    tensors, hidden = loader.tensors, loader.config.hidden_size
    names = [f"{prefix}.{name}_proj" for name in ("gate_up", "down")]
    own, both = loader.split(width), loader.split(2 * width)
    gate_up = tensors.take_arranged(
        names[0], (number, hidden, both), lambda read: read.unflatten(2, (-1, 2)).permute(0, 3, 2, 1)
    )
    down = tensors.take_arranged(names[1], (number, own, hidden), lambda read: read.transpose(1, 2))
    added = tensors.take_arranged(
        f"{names[0]}_bias", (number, both), lambda read: read.unflatten(1, (-1, 2)).transpose(1, 2)
    )
    biases = added.flatten(1), tensors.take(f"{names[1]}_bias", number, hidden)
    if loader.ops.group.rank:
        biases[1].zero_()  # one rank adds it
    return _checked(loader, _side_by_side(loader, gate_up.flatten(1, 2), down, activation, biases))


def _checked(loader: Loader, found: Experts) -> Experts:
    if found.stacked is None and loader.ops.mix_experts is not TORCH_OPS.mix_experts:
        raise ConfigError(
            f"--weights {loader.weights}: this backend runs a mixture of experts in {' or '.join(PLAIN_FORMS)} alone"
        )
    return found


def _experts(loader: Loader, prefix: str, number: int, width: int) -> Experts:
    tensors, size, activation = loader.tensors, loader.config.hidden_size, loader.config.activation
    own = loader.split(width)
    names = [f"{prefix}.{expert}." for expert in range(number)]
    if tensors.has(f"{prefix}.gate_up_proj"):
        rank_width = width // loader.ops.group.size
        both = loader.part(2 * rank_width, (rank_width, rank_width))
        whole = tensors.take(f"{prefix}.gate_up_proj", number, both, size)
        return _side_by_side(loader, whole, tensors.take(f"{prefix}.down_proj", number, size, own), activation)
    if loader.weights not in PLAIN_FORMS:
        pairs = [(f"{name}gate_proj", f"{name}up_proj") for name in names]
        gate_up = [loader.linear(pair, (own, own), size, bias=False) for pair in pairs]
        down = [loader.linear((f"{name}down_proj",), (size,), own, bias=False) for name in names]
        return Experts(gate_up=gate_up, down=down, activation=activation, stacked=None)
    pairs_of_all = tuple(f"{name}{each}_proj.weight" for name in names for each in ("gate", "up"))
    lone = tuple(f"{name}down_proj.weight" for name in names)
    gate_up_all = tensors.take_stacked(pairs_of_all, (own,) * (2 * number), size).unflatten(0, (number, -1))
    down_all = tensors.take_stacked(lone, (size,) * number, own).unflatten(0, (number, -1))
    return _side_by_side(loader, gate_up_all, down_all, activation)


def _side_by_side(
    loader: Loader, gate_up: Tensor, down: Tensor, activation: str, biases: tuple[Tensor, Tensor] | None = None
) -> Experts:
    """Experts of matrices that stand side by side; in a form that is not plain each becomes one of its own."""

    def each_of(matrices: Tensor, added: Tensor | None) -> list[Linear]:
        own = [None] * len(matrices) if added is None else added.unbind()
        return [
            loader.ops.keep(make_linear(matrix, bias, loader.weights), False)
            for matrix, bias in zip(matrices, own, strict=True)
        ]

    gate_up_bias, down_bias = biases or (None, None)
    return Experts(
        gate_up=each_of(gate_up, gate_up_bias),
        down=each_of(down, down_bias),
        activation=activation,
        stacked=(gate_up, down) if loader.weights in PLAIN_FORMS else None,
        biases=biases,
    )
