"""Attention backends: what each declares that it can do.

Plain declarations, no torch and no kernels; `config.resolve` turns them into a choice or an error. A new backend is
one more entry here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """What one attention backend can do, and what it needs."""

    name: str
    branch_pages: bool  # reads each draft branch through pages of its own, so trees may have pages of many tokens
    needs_host_lengths: bool  # wants the rows' lengths on the host before a step
    copied_max: int | None = None  # slots of a round, or of a branch, that it moves at once; None: any number


TORCH = Backend(name="torch", branch_pages=True, needs_host_lengths=True)

TRITON = Backend(name="triton", branch_pages=True, needs_host_lengths=False, copied_max=1024)

BACKENDS = (TORCH, TRITON)
