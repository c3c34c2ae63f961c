"""Session journal: sessions written down as they grow, so that an engine that starts anew, or another one, goes on.

To own a session is to have created the newest of its logs, which begins with the whole session; the older ones are
removed then. An owner writes first, then looks whether a newer log is there: only if not it may say that something was
done. So what was acknowledged is in every later log, and a former owner can acknowledge nothing. Called by the
scheduler.
"""

from array import array
from collections.abc import Callable
from hashlib import sha256
from random import SystemRandom

from roost.errors import CapacityError, RequestError
from roost.messages import Usage
from roost.session.epoch_logs import DamagedLog, EpochLogs, OwnedLog, Said, framed, records
from roost.session.table import Committed, Session

COMPACT_BYTES = 64 * 1024  # a log may become so much larger than twice the whole session it began with
_EPOCH_BITS = 48  # the first epoch is drawn, so that a former owner never meets its own number again
SESSION, TTL = "session", "ttl_ns"  # the kind of a log's first record; what it says there of its time


class SessionMoved(RequestError):
    """Another engine owns the session now."""

    def __init__(self, session: Session) -> None:
        super().__init__(410, "session_id", f"session {session.name!r} has moved: another replica owns it now")


class JournalError(CapacityError):
    """A session's log cannot be read or written."""


def random_epoch() -> int:
    """The first epoch of a session that has no log."""
    return SystemRandom().getrandbits(_EPOCH_BITS) + 1


def key_of_session(scoped_id: str) -> str:
    """The key of a session's logs, whatever characters its id has."""
    return sha256(scoped_id.encode("utf-8", "surrogatepass")).hexdigest()[:40]


class SessionJournal:
    """The journal as one engine uses it."""

    def __init__(self, logs: EpochLogs, model: str = "", first_epoch: Callable[[], int] = random_epoch) -> None:
        self._logs = logs
        self._model = model  # whose tokens these are
        self._first_epoch = first_epoch

    def has(self, scoped_id: str) -> bool:
        """Whether there may be such a session."""
        try:
            return bool(self._logs.epochs(key_of_session(scoped_id)))
        except OSError as error:
            raise _failed("read", error) from error

    def owns(self, session: Session) -> bool:
        """Whether nobody has taken this session over."""
        assert session.log is not None, session
        try:
            return self._is_newest(session.log)
        except OSError as error:
            raise _failed("read", error) from error

    def open(self, session: Session) -> None:
        """Write a new session down; 409 if there is one of this id."""
        key = key_of_session(session.id)
        taken = RequestError(409, "session_id", f"a session {session.name!r} is open already")
        try:
            before = self._logs.epochs(key)
            if before and self._read(session.id, key, before) is not None:
                raise taken
            log = OwnedLog(key=key, epoch=before[-1] + 1 if before else self._first_epoch())
            if not self._logs.create(key, log.epoch):
                raise taken
            others = [each for each in self._logs.epochs(key) if each != log.epoch]
            if self._read(session.id, key, others) is not None:  # somebody was faster
                self._logs.remove(key, log.epoch)
                raise taken
            self._write_whole(session, log, len(session.record))
            session.log = log
        except SessionMoved as error:
            raise taken from error
        except OSError as error:
            raise _failed("written", error) from error

    def take_over(self, scoped_id: str) -> tuple[Session, int] | None:
        """Claim a session and read it; also how long it has been idle, in nanoseconds. None if there is none."""
        key = key_of_session(scoped_id)
        try:
            before = self._logs.epochs(key)
            if not before:
                return None
            log = OwnedLog(key=key, epoch=before[-1] + 1)
            others = RequestError(409, "session_id", "another replica is taking over this session: try again")
            if not self._logs.create(key, log.epoch):
                raise others
            before = [each for each in self._logs.epochs(key) if each < log.epoch]
            try:
                found = self._read(scoped_id, key, before)
            except (JournalError, RequestError):
                self._logs.remove(key, log.epoch)
                raise
            if not self._is_newest(log):  # then what was read may have been half removed
                raise others
            if found is None or _is_expired(*found):
                self._remove([*before, log.epoch], key)
                return None
            session, idle_ns = found
            session.log = log
            self._write_whole(session, log, len(session.record))
        except OSError as error:
            raise _failed("written", error) from error
        return session, idle_ns

    def turn(self, session: Session, start: int, end: int, usage: Usage, note: str) -> None:
        """Write down that a turn has added the tokens of [start, end) to the record."""
        numbers = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        said = {"kind": "turn", "usage": numbers, "note": note}
        self._append(session, start, said, session.record.slice(start, end).tobytes())

    def rewind(self, session: Session, length: int, num_turns: int) -> None:
        """Write down that a session is cut."""
        self._append(session, len(session.record), {"kind": "rewind", "length": length, "turns": num_turns})

    def close(self, session: Session) -> None:
        """Remove a session; whoever takes it over meanwhile reads that it is closed."""
        log = session.log
        assert log is not None, session
        try:
            if not log.is_sound:  # behind a part of a record nobody would read it
                log = self._next_log(log, session)
            if not self._logs.append(log.key, log.epoch, framed({"kind": "closed"})) or not self._is_newest(log):
                raise SessionMoved(session)
            self._remove([each for each in self._logs.epochs(log.key) if each <= log.epoch], log.key)
        except OSError as error:
            raise _failed("written", error) from error

    def discard(self, scoped_id: str) -> None:
        """Remove what cannot be read."""
        key = key_of_session(scoped_id)
        try:
            self._remove(self._logs.epochs(key), key)
        except OSError as error:
            raise _failed("written", error) from error

    def _append(self, session: Session, committed_len: int, said: Said, tokens: bytes = b"") -> None:
        """Add a record to a session that had so many tokens before."""
        assert session.log is not None, session
        data = framed(said, tokens)
        try:
            if not session.log.is_sound or session.log.num_bytes > 2 * session.log.whole_bytes + COMPACT_BYTES:
                self._begin_anew(session, committed_len)
            log = session.log
            log.is_sound = False  # until it is known that all of it was written
            if not self._logs.append(log.key, log.epoch, data) or not self._is_newest(log):
                raise SessionMoved(session)
            log.is_sound = True
            log.num_bytes += len(data)
        except OSError as error:
            raise _failed("written", error) from error

    def _begin_anew(self, session: Session, length: int) -> None:
        """Go on in a new log, which begins with the whole session as it was committed."""
        assert session.log is not None, session
        session.log = self._next_log(session.log, session)
        self._write_whole(session, session.log, length)

    def _next_log(self, log: OwnedLog, session: Session) -> OwnedLog:
        after = OwnedLog(key=log.key, epoch=log.epoch + 1)
        if not self._is_newest(log) or not self._logs.create(after.key, after.epoch):
            raise SessionMoved(session)
        return after

    def _write_whole(self, session: Session, log: OwnedLog, length: int) -> None:
        """Begin a log; the older ones are needed no more, unless somebody has read them for a newer one."""
        log.is_sound = False
        data = _whole(session, self._model, length)
        if not self._logs.append(log.key, log.epoch, data) or not self._is_newest(log):
            raise SessionMoved(session)
        log.is_sound, log.num_bytes, log.whole_bytes = True, len(data), len(data)
        self._remove([each for each in self._logs.epochs(log.key) if each < log.epoch], log.key)

    def _is_newest(self, log: OwnedLog) -> bool:
        return self._logs.epochs(log.key)[-1:] == [log.epoch]

    def _remove(self, epochs: list[int], key: str) -> None:
        for epoch in epochs:  # the newest one last: it says what the session has come to
            self._logs.remove(key, epoch)

    def _read(self, scoped_id: str, key: str, epochs: list[int]) -> tuple[Session, int] | None:
        """The session that the newest of these logs holds, and how long it has been idle; None if it is closed."""
        for epoch in reversed(epochs):
            idle_ns, data = self._logs.idle_ns(key, epoch), self._logs.read(key, epoch)
            try:
                session, is_closed = _session_of(data, self._model)
            except (DamagedLog, ValueError, KeyError, TypeError) as error:
                why = f"the log of this session cannot be read ({key}/{epoch}: {error!r}); closing it removes it"
                raise JournalError(500, why) from error
            if is_closed:
                return None
            if session is not None and session.id == scoped_id:
                return session, idle_ns
        return None


def _is_expired(session: Session, idle_ns: int) -> bool:
    return session.ttl_ns is not None and idle_ns >= session.ttl_ns


def _whole(session: Session, model: str, length: int) -> bytes:
    """What a log begins with: what was fixed when the session was opened, then what its turns have made of it."""
    fixed = {
        "kind": SESSION,
        "model": model,
        "id": session.id,
        "salt": session.scoped_salt,
        "client": session.client,
        TTL: session.ttl_ns,
        "max_tokens": session.max_tokens,
        "shares": session.shares,
        "forked_from": session.forked_from,
    }
    turns = [
        (each.end_len, each.usage.prompt_tokens, each.usage.cached_tokens, each.usage.completion_tokens, each.note)
        for each in session.turns
    ]
    return framed(fixed) + framed({"kind": "whole", "turns": turns}, session.record.slice(0, length).tobytes())


def _session_of(data: bytes, model: str) -> tuple[Session | None, bool]:
    """What a log says: its session, None if it was cut short at its beginning, and whether that was closed."""
    session, is_whole = None, False
    for said, tokens in records(data):
        kind, added = said["kind"], array("i")
        added.frombytes(tokens)
        if kind == SESSION:
            session = _opened(said)
            if said["model"] != model:
                why = f"session {session.name!r} is of the model {said['model']!r}, this is {model!r}"
                raise RequestError(409, "session_id", why)
        elif kind == "closed":
            return session, True
        elif session is None:
            raise ValueError("it does not begin with a session")
        elif kind == "whole":
            session.record.append(added)
            session.turns += [_committed(*each) for each in said["turns"]]
            is_whole = True
        elif kind == "turn":
            session.record.append(added)
            prompt, cached, completion = said["usage"]
            session.turns.append(_committed(len(session.record), prompt, cached, completion, said["note"]))
        elif kind == "rewind":
            if not 0 <= said["length"] <= len(session.record):
                raise ValueError("it is cut to more than it has")
            session.record.cut(said["length"])
            del session.turns[said["turns"] :]
    return (session if is_whole else None), False


def _opened(said: Said) -> Session:
    return Session(
        id=said["id"],
        scoped_salt=said["salt"],
        client=said["client"],
        ttl_ns=said[TTL],
        max_tokens=said["max_tokens"],
        shares=said["shares"],
        forked_from=said["forked_from"],
    )


def _committed(end_len: int, prompt: int, cached: int, completion: int, note: str) -> Committed:
    usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
    return Committed(end_len=end_len, usage=usage, note=note)


def _failed(done: str, error: OSError) -> JournalError:
    return JournalError(503, f"the journal cannot be {done}: {error.strerror or error} (--journal)")
