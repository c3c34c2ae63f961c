"""A group of ranks that are threads of one process: each runs its own model, and they meet at a barrier.

Between two meetings one of them runs at a time, since a backend may keep something for the whole process.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from roost.layers.group import Group

_PATIENCE_S = 120.0  # for a rank that does not come
Result = TypeVar("Result")


class _Meeting:
    """Where ranks leave tensors for each other."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.parts: list[Tensor | None] = [None] * size
        self.turn = threading.Lock()

    def wait(self) -> None:
        """Let the others run until all are here."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class ThreadRank:
    """One of the ranks."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, len(meeting.parts), meeting
        self.num_collectives = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum, in the order of the ranks; what was handed in is overwritten, as it may be."""
        parts = self._exchanged(part)
        total = parts[0]
        for each in parts[1:]:
            total = total + each
        part.fill_(torch.nan)
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        """The tensors side by side."""
        return torch.cat(self._exchanged(part), dim=-1)

    def _exchanged(self, part: Tensor) -> list[Tensor]:
        self.num_collectives += 1
        meeting = self._meeting
        meeting.parts[self.rank] = part.clone()
        if part.is_cuda:
            torch.cuda.synchronize()  # each rank has a stream of its own
        meeting.wait()
        parts = [each for each in meeting.parts if each is not None]
        assert len({(each.shape, each.dtype) for each in parts}) == 1, [each.shape for each in parts]
        meeting.wait()
        return parts

    def leave(self) -> None:
        """The others wait for it no longer."""
        self._meeting.barrier.abort()


def on_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """What each rank makes of some work, all at the same time."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        group = ThreadRank(rank, meeting)
        with meeting.turn:
            try:
                return work(group)
            except BaseException:
                group.leave()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [each.exception() for each in futures if each.exception() is not None]
    first = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return [each.result() for each in futures]
