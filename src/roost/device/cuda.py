"""A CUDA GPU: a stream for steps, a stream for copies, pinned memory between, and graphs. The only user of torch.cuda.

Nothing here waits for the device but a fetched result, and `capture`, at start-up.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Fetched, Replay

_FEW_BYTES = 2**16


def capability_of(device: torch.device) -> tuple[int, int]:
    """Major and minor number of what the device's processors can do."""
    return torch.cuda.get_device_capability(device)


def name_of(device: torch.device) -> str:
    """What its maker calls a device."""
    return torch.cuda.get_device_name(device)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes that the driver has left and that torch keeps unused; and all there are."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused, total


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: memory of the device that is given back meanwhile would void what is being captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaDevice:
    """One GPU."""

    runs_beside_the_host = True

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self._forward, self._copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._forward.wait_stream(torch.cuda.current_stream(device))  # weights were loaded there
        self._graph_pool = torch.cuda.graph_pool_handle()
        self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def forward(self) -> AbstractContextManager[object]:
        """The stream of the steps."""
        return torch.cuda.stream(self._forward)

    def put(self, array: np.ndarray) -> Tensor:
        """Through pinned memory; the allocator keeps that until the copy is done."""
        return torch.from_numpy(array).pin_memory().to(self.torch, non_blocking=True)

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """Through one pinned buffer for all of them."""
        total = sum(array.size for array in arrays.values())
        pinned = torch.empty(total, dtype=torch.int64, pin_memory=True)
        if total:
            np.concatenate([array.reshape(-1) for array in arrays.values()], out=pinned.numpy(), casting="unsafe")
        parts = pinned.to(self.torch, non_blocking=True).split([array.size for array in arrays.values()])
        return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched:
        """A few numbers in the order of the steps, which costs them less than to hand over; more of them beside it."""
        here = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        arrived = torch.cuda.Event()
        if sum(each.nbytes for each in tensors) <= _FEW_BYTES:
            for source, dest in zip(tensors, here, strict=True):
                dest.copy_(source, non_blocking=True)
            arrived.record(self._forward)
        else:
            taken = [tensor.clone() for tensor in tensors]
            self._copies.wait_stream(self._forward)
            with torch.cuda.stream(self._copies):
                for source, dest in zip(taken, here, strict=True):
                    dest.copy_(source, non_blocking=True)
                    source.record_stream(self._copies)
            arrived.record(self._copies)

        def wait() -> list[np.ndarray]:
            arrived.synchronize()
            return [tensor.numpy() for tensor in here]

        return wait

    def capture(self, work: Callable[[], None]) -> Replay | None:
        """A CUDA graph of some work, which runs once before, so that everything it needs is compiled and loaded."""
        with torch.cuda.stream(self._forward):
            work()
            self._forward.synchronize()
            graph = torch.cuda.CUDAGraph()
            with _uncollected(), torch.cuda.graph(graph, pool=self._graph_pool, stream=self._forward):
                work()
        return graph.replay
