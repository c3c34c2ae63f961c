"""A checkpoint's tensors, by name: a model takes each of them once, with the shape that its config implies.

A tensor that is missing, left over, or of a wrong shape or type is refused, since the output would be silently wrong.
What is taken is a copy, made one tensor at a time, so that the source may be a lazy mapping over files; where a length
is a `Cut`, that part alone is read. The matrix of a projection may be quantised (`QuantisedState`); taken as a tensor
it is the floats that it stands for. Called by models while they load.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.linear import head_form, plain_form
from roost.layers.quantised import QuantisedWeight, stack
from roost.models.parts import Length, Shape, check_shape, cut, is_whole, lengths

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.bool)
_FLOATS_WANTED = "weights are read as floats of 16 to 64 bits"


class PartialState(Mapping[str, Tensor]):
    """A state dict that reads no more of a tensor than is asked for."""

    @abstractmethod
    def part(self, name: str, shape: Shape) -> Tensor:
        """What a shape says of a tensor, whose whole shape must be as that says."""


def read_part(state: Mapping[str, Tensor], name: str, shape: Shape) -> Tensor:
    """What a shape says of a tensor, or all of it."""
    if isinstance(state, PartialState) and not is_whole(shape):
        return state.part(name, shape)
    tensor = state[name].detach()
    check_shape(name, tensor.shape, shape)
    return tensor if is_whole(shape) else cut(tensor, shape)


class QuantisedState(PartialState):
    """A state dict with quantised matrices in it: each is there as floats by its name, `….weight`, too."""

    @property
    @abstractmethod
    def form(self) -> str | None:
        """The form of its quantised matrices, as --weights names it; None where it has none."""

    @abstractmethod
    def quantised(self, name: str, device: torch.device, shape: Shape | None = None) -> QuantisedWeight | None:
        """The matrix `name` on a device as the checkpoint keeps it, or a part of it; None where it is not quantised."""


class Tensors:
    """A state dict on its way into a model."""

    def __init__(self, state: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._state = state
        self._left = dict.fromkeys(state)  # names alone, in order: a value is read when it is taken
        self.device = device
        self._dtype = dtype

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name that has not been taken."""
        return name in self._left

    def take(self, name: str, *shape: Length, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of the tensor of that name; it must be there, with that shape."""
        return self.take_stacked((name,), shape[:1], *shape[1:], dtype=dtype)

    def take_stacked(
        self, names: tuple[str, ...], firsts: Shape, *rest: Length, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One tensor of several, each [first, *rest], along the first dimension."""
        own = lengths(firsts)
        whole = torch.empty((sum(own), *lengths(rest)), dtype=dtype or self._dtype, device=self.device)
        for name, first, part in zip(names, firsts, whole.split(own), strict=True):
            part.copy_(self._read(name, (first, *rest)))
        return whole

    def take_arranged(self, name: str, shape: Shape, arrange: Callable[[Tensor], Tensor]) -> Tensor:
        """A copy of the view that `arrange` makes of the tensor of that name."""
        view = arrange(self._read(name, shape))
        return torch.empty(view.shape, dtype=self._dtype, device=self.device).copy_(view)

    def take_projection(self, names: tuple[str, ...], out_lens: Shape, in_len: Length) -> Tensor | QuantisedWeight:
        """One matrix of several that read the same input; quantised where all of them are, in the same way."""
        found = [self._quantised(name, (out_len, in_len)) for name, out_len in zip(names, out_lens, strict=True)]
        whole = stack([each for each in found if each is not None]) if None not in found else None
        if whole is None:
            return self.take_stacked(names, out_lens, in_len)
        for name, part, out_len in zip(names, found, out_lens, strict=True):
            assert part is not None
            check_shape(name, part.shape, lengths((out_len, in_len)))
            self._remove(name)
        return whole

    def form_of(self, weight: Tensor | QuantisedWeight, weights: str, *, is_head: bool = False) -> str:
        """The form to keep a matrix in: what a quantised checkpoint leaves in floats stays so."""
        if not isinstance(weight, Tensor):
            return weights
        form = plain_form(weights) if self._has_plain else weights
        return head_form(form) if is_head else form

    def take_integers(self, name: str, length: int) -> Tensor:
        """A copy of a list of integers or booleans, as int64."""
        kinds = "it is read as integers or booleans"
        return self._read(name, (length,), INTEGERS, kinds).to(self.device, torch.int64, copy=True)

    def drop_if(self, is_known: Callable[[str], bool]) -> None:
        """Leave out tensors that follow from others."""
        self._left = {name: None for name in self._left if not is_known(name)}

    def check_all_taken(self) -> None:
        """Refuse tensors that the model would ignore, but for biases of zeros that some quantisers write."""
        if self._has_plain:
            self.drop_if(lambda name: name.endswith("_proj.bias") and not self._state[name].any())
        if self._left:
            raise ConfigError(f"the checkpoint has tensors that this model does not use: {_listed(self._left)}")

    @property
    def _has_plain(self) -> bool:
        """Whether it is a quantised checkpoint, in which floats are what was left out."""
        return isinstance(self._state, QuantisedState) and self._state.form is not None

    def _quantised(self, name: str, shape: Shape) -> QuantisedWeight | None:
        if not isinstance(self._state, QuantisedState) or name not in self._left:
            return None
        return self._state.quantised(name, self.device, None if is_whole(shape) else shape)

    def _read(
        self, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...] = FLOATS, kinds: str = _FLOATS_WANTED
    ) -> Tensor:
        self._remove(name)
        tensor = read_part(self._state, name, shape)
        if tensor.dtype not in dtypes:
            raise ConfigError(f"the checkpoint's {name} is of {tensor.dtype}; {kinds}")
        return tensor

    def _remove(self, name: str) -> None:
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        del self._left[name]


def _listed(names: Mapping[str, None]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
