"""Journal files: the logs of a journal as files in a folder, which replicas may share.

A folder for each session, a file for each epoch: `<key>/<epoch>.log`. Everybody must see a new file at once, as on a
local disk. The only module that reads and writes a journal's files. Opened at start-up, used by `session.journal`.
"""

import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from roost.config.options import SessionConfig
from roost.errors import ConfigError
from roost.session.epoch_logs import DamagedLog, records
from roost.session.journal import SESSION, TTL, SessionJournal

SWEEP_AFTER_NS = 24 * 3600 * 1_000_000_000  # that a session's time is over, before one that nobody asks for is removed
_BEGINNING = 4096  # bytes that hold a log's first record
_SUFFIX = ".log"
_log = logging.getLogger(__name__)


class FileLogs:
    """Logs in a folder."""

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        self._folder = folder
        self._fsync = fsync

    def epochs(self, key: str) -> list[int]:
        """The epochs of a session that have a file."""
        try:
            names = os.listdir(self._folder / key)
        except FileNotFoundError:
            return []
        numbers = [name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)]
        return sorted(int(number) for number in numbers if number.isdecimal())  # others are not ours

    def create(self, key: str, epoch: int) -> bool:
        """Make an empty file, if there is none."""
        path = self._path(key, epoch)
        try:
            path.parent.mkdir(exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except (FileExistsError, FileNotFoundError):  # the latter: its folder was removed this moment
            return False
        if self._fsync:
            _sync(path.parent, os.O_RDONLY)
            _sync(self._folder, os.O_RDONLY)
        return True

    def append(self, key: str, epoch: int, data: bytes) -> bool:
        """Write at the end of a file that is there."""
        try:
            file = os.open(self._path(key, epoch), os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return False
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
            if self._fsync:
                os.fsync(file)
        finally:
            os.close(file)
        return True

    def read(self, key: str, epoch: int) -> bytes:
        """The whole file."""
        try:
            return self._path(key, epoch).read_bytes()
        except FileNotFoundError:
            return b""

    def remove(self, key: str, epoch: int) -> None:
        """Remove a file, and its folder with the last one."""
        path = self._path(key, epoch)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # others are in it, or it is gone
            path.parent.rmdir()

    def idle_ns(self, key: str, epoch: int) -> int:
        """Since the file was last written to, by the clock of the system."""
        try:
            return max(0, time.time_ns() - self._path(key, epoch).stat().st_mtime_ns)
        except FileNotFoundError:
            return 0

    def sweep(self) -> int:
        """Remove sessions whose time has long been over, which no engine has closed; how many these were."""
        num_removed = 0
        for folder in list(self._folder.iterdir()):
            epochs = self.epochs(folder.name) if folder.is_dir() else []
            if epochs and self._is_over(folder.name, epochs[-1]):
                num_removed += 1
                for epoch in epochs:
                    self.remove(folder.name, epoch)
        return num_removed

    def _is_over(self, key: str, epoch: int) -> bool:
        idle_ns = self.idle_ns(key, epoch)
        if idle_ns < SWEEP_AFTER_NS:
            return False
        gone = FileNotFoundError  # another engine that starts was faster
        with suppress(DamagedLog, ValueError, gone), self._path(key, epoch).open("rb") as file:
            for said, _ in records(file.read(_BEGINNING)):
                ttl_ns = said.get(TTL) if said.get("kind") == SESSION else None
                return ttl_ns is not None and idle_ns >= ttl_ns + SWEEP_AFTER_NS
        return False

    def _path(self, key: str, epoch: int) -> Path:
        return self._folder / key / f"{epoch}{_SUFFIX}"


def open_journal(config: SessionConfig, model: str) -> SessionJournal | None:
    """The journal that --journal asks for, if any; a folder that cannot be written is a ConfigError."""
    if config.journal is None:
        return None
    folder = Path(config.journal)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        logs = FileLogs(folder.resolve(), fsync=config.journal_fsync)
        num_removed = logs.sweep()
    except OSError as error:
        raise ConfigError(f"--journal {folder}: cannot be written: {error.strerror or error}") from error
    if num_removed:
        _log.info("%d sessions whose time is over were removed from the journal", num_removed)
    return SessionJournal(logs, model)


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)
