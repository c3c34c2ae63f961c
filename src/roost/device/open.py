"""The device that torch names: one place chooses, so that nobody else asks which it is.

Only a machine with CUDA loads the module that names it. Called by the executor and at start-up.
"""

import torch

from roost.device.cpu import CpuDevice
from roost.device.device import Device

_FP8_CAPABILITY = (8, 9)  # from Ada on


def open_device(device: torch.device) -> Device:
    """A device by its name to torch."""
    if device.type == "cpu":
        return CpuDevice()
    from roost.device.cuda import CudaDevice  # noqa: PLC0415 (only there is there a CUDA to name)

    return CudaDevice(device)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None where there is no such thing."""
    if device.type == "cpu":
        return None
    from roost.device import cuda  # noqa: PLC0415 (only there is there a CUDA to name)

    return cuda.capability_of(device)


def num_devices(device: torch.device) -> int:
    """How many devices of its kind the machine has."""
    return 1 if device.type == "cpu" else torch.accelerator.device_count()


def name_of(device: torch.device) -> str | None:
    """What the maker of a CUDA device calls it; None where there is no such thing."""
    if device.type == "cpu":
        return None
    from roost.device import cuda  # noqa: PLC0415 (only there is there a CUDA to name)

    return cuda.name_of(device)


def memory_of(device: torch.device) -> tuple[int, int] | None:
    """Bytes that are free on a device, and all there are; None where nobody counts them."""
    if device.type == "cpu":
        return None
    from roost.device import cuda  # noqa: PLC0415 (only there is there a CUDA to name)

    return cuda.memory_of(device)


def has_fp8(device: torch.device) -> bool:
    """Whether a device computes with 8-bit floats."""
    capability = capability_of(device)
    return capability is not None and capability >= _FP8_CAPABILITY
