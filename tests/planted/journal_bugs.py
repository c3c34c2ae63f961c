"""Planted bugs of the journal: two owners of a session, and turns that were acknowledged and are lost.

Found by the seeds in which several replicas share a journal (tests/sim/replicas.py), or by a test.
"""

from tests.planted.bug import Bug

_JOURNAL, _FILES = "roost.session.journal", "tests/unit/session/test_journal.py::"

JOURNAL_BUGS = (
    Bug(
        "journal_before_the_answer",
        "roost.sched.ending",
        "        write_turn(state, request.turn, returned_len, _usage(request, completion), request.submit.note)",
        "        pass",
        "a turn is acknowledged that the next engine does not know",
    ),
    Bug(
        "journal_fences_a_turn",
        _JOURNAL,
        "            if not self._logs.append(log.key, log.epoch, data) or not self._is_newest(log):",
        "            if not self._logs.append(log.key, log.epoch, data):",
        "a former owner acknowledges what the new one may have read without it",
    ),
    Bug(
        "journal_epoch_of_a_claim",
        _JOURNAL,
        "            log = OwnedLog(key=key, epoch=before[-1] + 1)",
        "            log = OwnedLog(key=key, epoch=before[0] - 1)",
        "an engine that takes a session over is not its newest owner",
    ),
    Bug(
        "journal_claims_before_it_reads",
        _JOURNAL,
        "                found = self._read(scoped_id, key, before)",
        "                found = self._read(scoped_id, key, before[:-1])",
        "what the last owner wrote is not read",
    ),
    Bug(
        "journal_behind_a_torn_write",
        _JOURNAL,
        "            log.is_sound = False  # until it is known that all of it was written",
        "            log.is_sound = True",
        "a turn is written behind a part of another, where nobody reads it",
    ),
    Bug(
        "journal_looks_before_a_turn",
        "roost.sched.journaling",
        "        if known is not None and known.log is not None and not state.journal.owns(known):",
        "        if known is None and state.journal is None:",
        "a former owner goes on from its old copy, or describes it",
    ),
    Bug(
        "journal_ends_with_a_session",
        "roost.sched.ending",
        "        error = write_closed(state, session)",
        "        error = None",
        "a session that was closed is open again in the next engine",
    ),
    Bug(
        "journal_of_what_is_half_removed",
        _JOURNAL,
        "            if not self._is_newest(log):  # then what was read may have been half removed",
        "            if not before:",
        "two engines take a session over at once, and one says that there is none",
        test=_FILES + "test_nothing_that_was_acknowledged_is_lost_whoever_acts_between_two_operations",
    ),
    Bug(
        "journal_epochs_are_drawn",
        _JOURNAL,
        "    return SystemRandom().getrandbits(_EPOCH_BITS) + 1",
        "    return 1",
        "a former owner takes a new session of the same name for its own",
        test=_FILES + "test_closed_and_expired_sessions_leave_nothing_behind",
    ),
)
