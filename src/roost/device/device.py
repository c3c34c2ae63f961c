"""What the executor asks of a device: transfers that do not wait, a place for the step's work, graphs.

One object is made by the executor and passed down. Everything that differs between devices and is not a kernel is
behind it. Implemented in this folder.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Fetched = Callable[[], list[np.ndarray]]  # waits for what was on its way
Replay = Callable[[], None]  # does again, with the same tensors, what was captured


class Device(Protocol):
    """A CPU or a GPU."""

    @property
    def torch(self) -> torch.device:
        """Its name to torch."""
        ...

    @property
    def runs_beside_the_host(self) -> bool:
        """Whether work is handed to it and goes on by itself; if not, the executor needs a thread."""
        ...

    @property
    def num_processors(self) -> int:
        """Multiprocessors that share a kernel's work; 1 if there is no such thing."""
        ...

    def forward(self) -> AbstractContextManager[object]:
        """Inside, operations are queued in the order of the steps."""
        ...

    def put(self, array: np.ndarray) -> Tensor:
        """One array of any type on the device, without waiting."""
        ...

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Arrays of whole numbers as int64 tensors on the device, in one transfer, without waiting."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """Start bringing tensors to the host; what is queued later may overwrite them."""
        ...

    def capture(self, work: Callable[[], None]) -> Replay | None:
        """Run some work once, then keep it for replays; None where there are no graphs."""
        ...
