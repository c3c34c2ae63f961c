"""The CPU: an operation has run when its call returns, so there is nothing to wait for.

Transfers are copies, a step's work has no place of its own, and nothing is captured. Made by `open_device`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Fetched, Replay


class CpuDevice:
    """The host itself."""

    torch = torch.device("cpu")
    runs_beside_the_host = False
    num_processors = 1

    def forward(self) -> AbstractContextManager[object]:
        """Nothing to prepare."""
        return nullcontext()

    def put(self, array: np.ndarray) -> Tensor:
        """A copy: the array may be changed afterwards."""
        return torch.from_numpy(array.copy())

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Copies: an array may be changed afterwards."""
        return {name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()}

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """They are here, and are copied before anything else runs."""
        arrays = [tensor.numpy().copy() for tensor in tensors]
        return lambda: arrays

    def capture(self, work: Callable[[], None]) -> Replay | None:
        """There are no graphs."""
        return None
