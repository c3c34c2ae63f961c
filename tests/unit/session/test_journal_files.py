"""A journal in a folder: what may be there, what is refused at start, and what is tidied up."""

import os
import time
from pathlib import Path

import pytest

from roost.config.options import SessionConfig
from roost.errors import ConfigError
from roost.session.journal import SessionJournal, key_of_session
from roost.session.journal_files import _BEGINNING, SWEEP_AFTER_NS, FileLogs, open_journal
from roost.session.table import Session


def _opened(journal: SessionJournal, name: str, ttl_ns: int | None = None, length: int = 0) -> None:
    session = Session(id=name, scoped_salt="", ttl_ns=ttl_ns)
    session.record.append(range(length))
    journal.open(session)


def test_without_a_folder_there_is_no_journal() -> None:
    assert open_journal(SessionConfig(), "m") is None


def test_a_folder_is_made_and_one_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "journal"
    journal = open_journal(SessionConfig(journal=str(folder)), "m")
    assert journal is not None
    _opened(journal, "any/../characters \0 \ud800")
    assert [each.name for each in folder.iterdir()] == [key_of_session("any/../characters \0 \ud800")]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--journal .*file: cannot be written"):
        open_journal(SessionConfig(journal=str(tmp_path / "file")), "m")


@pytest.mark.parametrize("length", [1, _BEGINNING])
def test_sessions_that_nobody_asks_for_any_more_are_removed_long_after_their_time(tmp_path: Path, length: int) -> None:
    journal, second = SessionJournal(FileLogs(tmp_path), "m"), 1_000_000_000
    ages = {"young": SWEEP_AFTER_NS, "old": SWEEP_AFTER_NS + 5 * second, "timeless": 10 * SWEEP_AFTER_NS}
    for name, age_ns in ages.items():
        _opened(journal, name, None if name == "timeless" else 3 * second, length)
        (file,) = (tmp_path / key_of_session(name)).iterdir()
        os.utime(file, ns=(0, time.time_ns() - age_ns))
    (tmp_path / "a stranger's file").write_text("")
    (tmp_path / key_of_session("timeless") / "notes.log").write_text("")
    damaged = tmp_path / key_of_session("damaged") / "7.log"
    damaged.parent.mkdir()
    damaged.write_bytes(bytes(range(200)))
    os.utime(damaged, ns=(0, 0))
    open_journal(SessionConfig(journal=str(tmp_path)), "m")
    left = {name for name in (*ages, "damaged") if journal.has(name)}
    assert left == {"young", "timeless", "damaged"}
    assert journal.take_over("young") is None, "its time is over all the same"


def test_engines_that_start_at_once_may_tidy_up_the_same_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_by_another(logs: FileLogs, key: str, epoch: int) -> int:
        logs.remove(key, epoch)
        return 3 * SWEEP_AFTER_NS

    _opened(SessionJournal(FileLogs(tmp_path), "m"), "old", ttl_ns=1)
    monkeypatch.setattr(FileLogs, "idle_ns", removed_by_another)
    assert open_journal(SessionConfig(journal=str(tmp_path)), "m") is not None
