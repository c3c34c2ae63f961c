"""Programmatic dependent launch: kernels that start while the one in front of them still runs.

Such a kernel may read what no earlier kernel writes (weights) until it calls `gdc_wait`, which returns when the kernel
in front has ended and all it wrote can be seen. All programs must call it, so that "in front" holds along a chain. On
devices below compute capability 9, and in the interpreter, kernels run one after the other. Called by launchers.
"""

from functools import cache

import torch
import triton

_ARCH_MIN = 90  # compute capability, times ten


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels of a device may start before the one in front ends."""
    return device.type == "cuda" and triton.runtime.driver.active.get_current_target().arch >= _ARCH_MIN


def launch_options(overlap: bool) -> dict[str, bool]:
    """What a launch says besides; the interpreter does not know the word."""
    return {"launch_pdl": True} if overlap else {}
