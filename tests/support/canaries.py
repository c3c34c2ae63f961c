"""Buffers between canaries, and how far a kernel may be from its reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

SENTINEL = 777.0
MARGIN = 64  # numbers before and after
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# One rounding of the output; the interpreter cuts bfloat16 off where a GPU rounds it to the nearest.
_STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-18}


class Fenced:
    """A contiguous tensor in the middle of a buffer whose other numbers must stay as they are."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, sentinel: float = SENTINEL
    ) -> None:
        length = torch.Size(shape).numel()
        self._sentinel = sentinel
        self._buffer = torch.full((length + 2 * MARGIN,), sentinel, dtype=dtype, device=device)
        self.tensor = self._buffer[MARGIN : MARGIN + length].view(*shape)

    def check(self) -> None:
        """Nothing was written outside of it."""
        assert (self._buffer[:MARGIN] == self._sentinel).all() and (self._buffer[-MARGIN:] == self._sentinel).all()


def assert_near(ours: Tensor, reference: Tensor, steps: float = 1.0) -> None:
    """Equal up to some roundings of the type, relative to the number or, near zero, to one."""
    assert ours.dtype == reference.dtype and ours.shape == reference.shape
    step = steps * _STEPS[ours.dtype]
    torch.testing.assert_close(ours.to(torch.float32), reference.to(torch.float32), rtol=step, atol=step)
