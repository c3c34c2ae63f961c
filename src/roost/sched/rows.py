"""Rows: the request slots of the device, and which of them are free.

A row is one line of the device's block tables, lengths and sampling state; a request has one only while it runs. A row
that a step in flight may still touch rests until that step is collected. The row that was free for longest is taken
first: what others may look up in its text stays there for as long as can be. Called by admission, ending and settle.
"""

from collections import deque

from roost.errors import InvariantError
from roost.step import RowId, StepId


class Rows:
    """Free, used and resting rows."""

    def __init__(self, num_rows: int) -> None:
        self._free = deque(RowId(row) for row in range(num_rows))
        self._used: set[RowId] = set()
        self._resting: list[tuple[StepId, RowId]] = []

    @property
    def num_free(self) -> int:
        """Rows that can be taken now."""
        return len(self._free)

    def take(self) -> RowId:
        """A free row."""
        row = self._free.popleft()
        self._used.add(row)
        return row

    def give_back(self, row: RowId, last_step: StepId, collected: StepId) -> None:
        """Release a row; it rests while `last_step`, the last step that names it, is in flight."""
        if row not in self._used:
            raise InvariantError(f"row {row} is given back but not in use")
        self._used.remove(row)
        if last_step <= collected:
            self._free.append(row)
        else:
            self._resting.append((last_step, row))

    def collected(self, step: StepId) -> None:
        """A step was collected: rows that rested until it are free."""
        self._free.extend(row for last_step, row in self._resting if last_step <= step)
        self._resting = [(last_step, row) for last_step, row in self._resting if last_step > step]
