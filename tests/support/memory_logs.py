"""Logs of a journal in memory: for tests, with faults, and with other engines that act between any two operations."""

from collections.abc import Callable

from roost.session.epoch_logs import EpochLogs


class MemoryLogs(EpochLogs):
    """Logs that every engine of a test shares."""

    def __init__(self, now_ns: Callable[[], int] = lambda: 0) -> None:
        self.logs: dict[str, dict[int, bytearray]] = {}
        self._written_at: dict[tuple[str, int], int] = {}
        self._now_ns = now_ns
        self.before: Callable[[str], None] = lambda operation: None  # may raise, and may let others act
        self.room: int | None = None  # bytes that still fit; None: no limit

    def epochs(self, key: str) -> list[int]:
        """The epochs of a session that have a log."""
        self.before("epochs")
        return sorted(self.logs.get(key, {}))

    def create(self, key: str, epoch: int) -> bool:
        """Make an empty log."""
        self.before("create")
        logs = self.logs.setdefault(key, {})
        if epoch in logs:
            return False
        logs[epoch] = bytearray()
        self._written_at[key, epoch] = self._now_ns()
        return True

    def append(self, key: str, epoch: int, data: bytes) -> bool:
        """Add to a log as much as there is room for."""
        self.before("append")
        log = self.logs.get(key, {}).get(epoch)
        if log is None:
            return False
        fits = len(data) if self.room is None else min(len(data), self.room)
        log += data[:fits]
        self._written_at[key, epoch] = self._now_ns()
        if self.room is not None:
            self.room -= fits
        if fits < len(data):
            raise OSError(28, "No space left on device")
        return True

    def read(self, key: str, epoch: int) -> bytes:
        """All of a log."""
        self.before("read")
        return bytes(self.logs.get(key, {}).get(epoch, b""))

    def remove(self, key: str, epoch: int) -> None:
        """Remove a log."""
        self.before("remove")
        self.logs.get(key, {}).pop(epoch, None)
        if not self.logs.get(key, {1: 1}):
            del self.logs[key]

    def idle_ns(self, key: str, epoch: int) -> int:
        """Since it was last added to."""
        return self._now_ns() - self._written_at.get((key, epoch), self._now_ns())
