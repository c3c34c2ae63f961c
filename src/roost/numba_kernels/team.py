"""The team: threads that run programs together, and sleep when there is nothing to run.

One member is whoever calls `run`; the others are threads of their own, which stay in compiled code without the
interpreter's lock while work keeps coming, and leave it to sleep when none has come for some milliseconds. Called by
`numba_kernels.execution`, whose one team this is.
"""

import threading

import numpy as np

from roost.numba_kernels import program
from roost.numba_kernels.records import NUM_FIELDS

_LINE = 64  # bytes of a cache line


class Team:
    """So many threads."""

    def __init__(self, size: int) -> None:
        assert size >= 1, size
        self.size = size
        self._space = np.zeros(program.PARKED + (size + 2) * _LINE, dtype=np.uint8)  # the control block lies in it
        self._control = self._space.ctypes.data + -self._space.ctypes.data % _LINE
        self._wake = [threading.Semaphore(0) for _ in range(size)]
        for member in range(1, size):
            threading.Thread(target=self._serve, args=(member,), name=f"numba-{member}", daemon=True).start()

    def run(self, records: np.ndarray) -> None:
        """Run records [length, NUM_FIELDS], one after the other."""
        assert records.shape[1] == NUM_FIELDS and records.flags.c_contiguous, records.shape
        assert len(records) < program.RECORDS_MAX, len(records)
        if program.enter(self._control, 0, self.size, records.ctypes.data, len(records), 0):
            self._wake_up()
            program.enter(self._control, 0, self.size, 0, 0, 0)

    def close(self) -> None:
        """Dissolve the team."""
        program.enter(self._control, 0, self.size, self._control, -1, 0)
        self._wake_up()

    def _wake_up(self) -> None:
        for member in range(1, self.size):
            self._wake[member].release()  # who is awake comes back once without need

    def _serve(self, member: int) -> None:
        seen = 0
        while (seen := program.enter(self._control, member, self.size, 0, 0, seen)) >= 0:
            self._wake[member].acquire()
