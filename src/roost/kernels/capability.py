"""What a device can do beside running kernels one after the other: overlap them, and hold large tiles.

Programmatic dependent launch lets a kernel start while the one in front of it still runs. It may read what no earlier
kernel writes (weights) until it calls `gdc_wait`, which returns when the kernel in front has ended and all it wrote can
be seen. All programs must call it, so that "in front" holds along a chain. Below compute capability 9, and in the
interpreter, kernels run one after the other. Asked by launchers.
"""

from functools import cache

import torch
from triton.runtime import driver

_ARCH_MIN = 90  # compute capability, times ten
_UNLIMITED = 2**31  # bytes, in the interpreter


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels may start before the one in front ends; the tensor memory accelerator came with that."""
    if device.type != "cuda":
        return False
    target = driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= _ARCH_MIN


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    if device.type != "cuda":
        return _UNLIMITED
    return driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors, each of which runs a few programs at a time."""
    if device.type != "cuda":
        return 1
    return driver.active.utils.get_device_properties(device.index or 0)["multiprocessor_count"]


def launch_options(overlap: bool) -> dict[str, bool]:
    """What a launch says besides; the interpreter does not know the word."""
    return {"launch_pdl": True} if overlap else {}
