"""The device that torch names. Called by the executor."""

import torch

from roost.exec.device.cpu import CpuDevice
from roost.exec.device.device import Device


def open_device(device: torch.device) -> Device:
    """A device by its name to torch."""
    if device.type == "cpu":
        return CpuDevice()
    from roost.exec.device.cuda import CudaDevice  # noqa: PLC0415 (only there is there a CUDA to name)

    return CudaDevice(device)
