"""A checkpoint's tensors, by name: a model takes each of them once, with the shape that its config implies.

A tensor that is missing, left over, or of a wrong shape or type is refused, since the output would be silently wrong.
What is taken is a copy, made one tensor at a time, so that the source may be a lazy mapping over files. Called by
models while they load.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from roost.errors import ConfigError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.bool)
_FLOATS_WANTED = "weights are read as floats of 16 to 64 bits"


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

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of the tensor of that name; it must be there, with that shape."""
        return self.take_stacked((name,), shape[:1], *shape[1:], dtype=dtype)

    def take_stacked(
        self, names: tuple[str, ...], lengths: tuple[int, ...], *rest: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """One tensor of several, each [length, *rest], along the first dimension."""
        stack = torch.empty((sum(lengths), *rest), dtype=dtype or self._dtype, device=self.device)
        for name, part in zip(names, stack.split(lengths), strict=True):
            part.copy_(self._read(name, part.shape))
        return stack

    def take_integers(self, name: str, length: int) -> Tensor:
        """A copy of a list of integers or booleans, as int64."""
        kinds = "it is read as integers or booleans"
        return self._read(name, torch.Size((length,)), INTEGERS, kinds).to(self.device, torch.int64, copy=True)

    def drop_if(self, is_known: Callable[[str], bool]) -> None:
        """Leave out tensors that follow from others."""
        self._left = {name: None for name in self._left if not is_known(name)}

    def check_all_taken(self) -> None:
        """Refuse tensors that the model would ignore."""
        if self._left:
            raise ConfigError(f"the checkpoint has tensors that this model does not use: {_listed(self._left)}")

    def _read(
        self, name: str, shape: torch.Size, dtypes: tuple[torch.dtype, ...] = FLOATS, kinds: str = _FLOATS_WANTED
    ) -> Tensor:
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        del self._left[name]
        tensor = self._state[name].detach()
        if tensor.dtype not in dtypes:
            raise ConfigError(f"the checkpoint's {name} is of {tensor.dtype}; {kinds}")
        if tensor.shape != shape:
            raise ConfigError(f"the checkpoint's {name} is {list(tensor.shape)}, its config says {list(shape)}")
        return tensor


def _listed(names: Mapping[str, None]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
