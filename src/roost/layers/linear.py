"""Linear layers: the one place that knows in which forms a weight matrix can be kept (`FORMS`).

A layer is made once, at load, and called as a function. With int8 weights (a scale per output) each token is rounded
with a scale of its own, and the products are whole numbers: a token's result has the same bits whatever else is in the
batch. With fp32 weights on a CPU the rows are padded for the same end (`layers.batch_invariance`). A quantised form is
a `QuantisedWeight`, which makes its own projection. Called by models, for every projection and for the logits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from roost.errors import ConfigError
from roost.layers import fp8, int4
from roost.layers.batch_invariance import padded_rows, row_multiple
from roost.layers.quantised import QuantisedWeight

Linear = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of weights that --weights can name."""

    activations: torch.dtype  # of KV, too, and of everything that is not a projection
    quantise: Callable[[Tensor], QuantisedWeight] | None = None  # a matrix of floats at load; None: not of this kind
    is_stored: bool = False  # only what a file stores in this form is kept in it
    floats: str | None = None  # the form of a matrix that such a file has as floats, where it is another
    embeds: bool = False  # an embedding that a file stores in this form stays in it: its projection looks rows up
    head: str | None = None  # the form of an LM head of floats, where it is another


FORMS = {
    "fp32": Form(activations=torch.float32),
    "bf16": Form(activations=torch.bfloat16),
    "int8": Form(activations=torch.float32),
    "fp8": Form(activations=torch.bfloat16, quantise=fp8.quantise),
    "int4": Form(activations=torch.bfloat16, quantise=int4.quantise, head="bf16"),  # as 4-bit checkpoints have it
    "gguf": Form(activations=torch.bfloat16, is_stored=True),  # blocks as the file has them; its floats are bf16
}
PLAIN_FORMS = ("fp32", "bf16")  # a matrix is kept as the floats that it is
_ON_CPU = {  # forms that are others there
    "gguf": Form(activations=torch.float32, is_stored=True, floats="int8", embeds=True)
}


def activation_dtype(weights: str, device: torch.device | None = None) -> torch.dtype:
    """The type of activations and KV beside weights of that form; on a CPU it may be another than elsewhere."""
    return _form(weights, device).activations


@runtime_checkable
class RowTable(Protocol):
    """A projection whose weights can be looked up, output by output."""

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs, as floats: of a head, the embedding of its tokens."""
        ...


def embeds(weights: str, device: torch.device) -> bool:
    """Whether an embedding that is stored in this form is kept in it."""
    return _form(weights, device).embeds


@dataclass(frozen=True, slots=True, eq=False)
class PlainLinear:
    """A projection by a weight as it is; kernels that fuse it with what stands around it read its fields."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return linear(hidden, self.weight, self.bias)


def plain_form(weights: str) -> str:
    """The form of what a quantised checkpoint leaves in floats: bf16 where `weights` keeps the rest quantised."""
    return weights if _form(weights).quantise is None else "bf16"


def head_form(weights: str) -> str:
    """The form of an LM head that a checkpoint has as floats."""
    return _form(weights).head or weights


def make_linear(weight: Tensor | QuantisedWeight, bias: Tensor | None, weights: str) -> Linear:
    """A projection by `weight` [out, in], kept in the form that `weights` says.

    A weight that is quantised already stays as it is where it has that form, and is dequantised for any other.
    """
    if isinstance(weight, QuantisedWeight):
        if weight.form == weights:
            return weight.linear(bias)
        weight = weight.dequantise()
    form = _form(weights, weight.device)
    if form.floats is not None:
        return make_linear(weight, bias, form.floats)
    if form.quantise is not None:
        return form.quantise(weight).linear(bias)
    if weights == "int8":
        return _int8(weight.float(), bias)
    kept, added = weight.to(form.activations), None if bias is None else bias.to(form.activations)
    if weights == "fp32" and weight.device.type == "cpu":
        return partial(_padded_linear, weight=kept, bias=added)
    return PlainLinear(kept, added)


def _form(weights: str, device: torch.device | None = None) -> Form:
    if weights not in FORMS:
        raise ConfigError(f"--weights must be one of {', '.join(FORMS)}, got {weights}")
    on_cpu = _ON_CPU if device is not None and device.type == "cpu" else {}
    return on_cpu.get(weights, FORMS[weights])


def _padded_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A projection in float32 whose result for a token does not depend on how many there are."""
    multiple = row_multiple(torch.get_num_threads()) or 1
    missing = padded_rows(len(hidden), multiple) - len(hidden)
    if not missing:
        return linear(hidden, weight, bias)
    return linear(pad(hidden, (0, 0, 0, missing)), weight, bias)[: len(hidden)]


_STEPS = 127  # of a scale, on either side of zero
_SCALE_LEAST = 1e-30  # of a row of zeros


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear:
    """A projection in whole numbers: y = (round(x / s) @ q) * s * t, s the token's scale, t the output's."""

    values: Tensor  # [in, out] int8, one output's next to each other
    scales: Tensor  # [out] float32
    bias: Tensor | None

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        scales = hidden.abs().amax(dim=-1, keepdim=True).clamp_(min=_SCALE_LEAST).mul_(1 / _STEPS)  # [num_tokens, 1]
        tokens = (hidden / scales).round_().to(torch.int8)
        products = torch._int_mm(tokens, self.values) * (scales * self.scales)
        return products if self.bias is None else products + self.bias


def _int8(weight: Tensor, bias: Tensor | None) -> Int8Linear:
    scales = weight.abs().amax(dim=1).clamp_(min=_SCALE_LEAST) / _STEPS  # [out]
    return Int8Linear((weight / scales[:, None]).round_().to(torch.int8).contiguous().t(), scales, bias)
