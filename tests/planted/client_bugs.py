"""Planted bugs of what lies between clients: commands that come too late, names, spaces and limits of each.

Found by the seeds, or by a test where chance would not do or the server is meant.
"""

from tests.planted.bug import Bug

_LATE = "tests/unit/server/test_late_answers.py::"

CLIENT_BUGS = (
    Bug(
        "late_command_is_refused",
        "roost.sched.intake",
        "        if read_by is not None and state.now > read_by:",
        "        if read_by is not None and state.now > read_by + 1:",
        "a command whose sender was told 503 is carried out",
    ),
    Bug(
        "punctual_command_is_carried_out",
        "roost.sched.intake",
        "        if read_by is not None and state.now > read_by:",
        "        if read_by is not None and state.now >= read_by:",
        "a command that was read in time is refused",
    ),
    Bug(
        "late_open_is_closed_again",
        "roost.server.sessions",
        "        opening.is_awaited = False",
        "        opening.is_awaited = True",
        "a session opened after its opener was refused stays open, and nobody knows it",
        test=_LATE + "test_a_session_opened_after_its_opener_was_refused_is_closed_again",
    ),
    Bug(
        "late_rewind_keeps_its_session",
        "roost.server.turns",
        "            if not change.is_sent:",
        "            if change.is_sent:",
        "a turn is made of a transcript that a rewind on its way is about to cut",
        test=_LATE + "test_a_rewind_that_comes_late_cuts_the_transcript_and_the_next_turn_waits_for_it",
    ),
    Bug(
        "late_answer_is_seen",
        "roost.server.link",
        "            if answer is not None or isinstance(event, Finished | Refused):",
        "            if answer is None or isinstance(event, Finished | Refused):",
        "who followed a command is kept for ever",
        test=_LATE + "test_nothing_is_kept_of_what_was_answered",
    ),
    Bug(
        "refused_close_leaves_it_open",
        "roost.server.turns",
        "        self._conversation.num_closing -= 1",
        "        self._conversation.num_closing -= 0",
        "a session whose close was not carried out can be neither used nor closed",
        test=_LATE + "test_a_close_is_taken_over_when_it_comes_and_undone_when_it_is_refused",
    ),
)
