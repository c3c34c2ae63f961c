"""Planted bugs of what lies between clients: commands that come too late, names, spaces and limits of each.

Found by the seeds, or by a test where chance would not do or the server is meant.
"""

from tests.planted.bug import Bug

_LATE, _TENANTS = "tests/unit/server/test_late_answers.py::", "tests/unit/server/test_tenants.py::"
_LIMITS, _MODULE = "tests/unit/sched/test_limits.py::", "roost.sched.limits"

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
    Bug(
        "client_running_limit",
        _MODULE,
        "        if most is None or num_running[request.submit.client] < most:",
        "        if most is None or num_running[request.submit.client] <= most:",
        "a client runs one more than it may",
    ),
    Bug(
        "client_running_counts_who_runs",
        _MODULE,
        "    num_running = Counter(each.submit.client for each in state.running)",
        "    num_running = Counter(each.submit.client for each in state.requests.values() if each.turn.started)",
        "a client's retracted request counts as running, and never runs again",
    ),
    Bug(
        "client_limit_holds_nobody_up",
        _MODULE,
        "    for request in state.queued:",
        "    for request in state.queued[:1]:",
        "a client at its limit holds up everybody behind it",
        test=_LIMITS + "test_a_client_at_its_running_limit_is_passed_over_and_holds_nobody_up",
    ),
    Bug(
        "client_queue_limit",
        _MODULE,
        "    if num_waiting >= most:",
        "    if num_waiting > most:",
        "a client has one more waiting than it may",
    ),
    Bug(
        "client_queue_counts_who_waits",
        _MODULE,
        "    num_waiting = sum(each.submit.client == client and each.row is None for each in state.requests.values())",
        "    num_waiting = sum(each.submit.client == client for each in state.requests.values())",
        "a client's running requests count as waiting",
    ),
    Bug(
        "client_queue_counts_its_own",
        _MODULE,
        "    num_waiting = sum(each.submit.client == client and each.row is None for each in state.requests.values())",
        "    num_waiting = sum(each.row is None for each in state.requests.values())",
        "a client is refused because others wait",
    ),
    Bug(
        "client_queue_counts_all_who_wait",
        _MODULE,
        "    num_waiting = sum(each.submit.client == client and each.row is None for each in state.requests.values())",
        "    num_waiting = sum(each.submit.client == client for each in state.queued)",
        "who waits for a session or a leader is not counted",
    ),
    Bug(
        "client_sessions_limit",
        _MODULE,
        "    if num_open >= most:",
        "    if num_open > most:",
        "a client opens one session more than it may",
    ),
    Bug(
        "client_sessions_counts_its_own",
        _MODULE,
        "    num_open = sum(session.client == client for session in state.sessions.table.values())",
        "    num_open = len(state.sessions.table)",
        "a client is refused a session because of others'",
    ),
    Bug(
        "client_priorities",
        _MODULE,
        "    if not low <= priority <= high:",
        "    if not low <= priority:",
        "a client goes before others although it may not",
    ),
    Bug(
        "client_cache",
        "roost.sched.intake",
        "            space=session.space if session else scoped(submit.client, submit.salt),",
        "            space=session.space if session else submit.salt,",
        "what one client has said is found by another",
    ),
    Bug(
        "client_session_cache",
        "roost.sched.sessions",
        "        space=scoped(command.client, command.salt),",
        "        space=command.salt,",
        "what one client's session holds is found by another's",
    ),
    Bug(
        "client_of_a_fork",
        "roost.session.table",
        "            client=session.client,",
        '            client="",',
        "a fork is nobody's",
    ),
    Bug(
        "abort_all_is_ones_own",
        "roost.server.native",
        "    whose = None if body.abort_all and client.is_admin else client.name",
        "    whose = None if body.abort_all else client.name",
        "one client ends the requests of all",
        test=_TENANTS + "test_a_request_can_be_named_as_anothers_and_is_ended_by_its_own_key_alone",
    ),
    Bug(
        "request_names_are_ones_own",
        "roost.server.link",
        "        own = (submit.client, name)",
        '        own = ("", name)',
        "a name that another client uses is taken",
        test=_TENANTS + "test_a_request_can_be_named_as_anothers_and_is_ended_by_its_own_key_alone",
    ),
    Bug(
        "flush_is_an_admins",
        "roost.server.keys",
        "    if not caller(request).is_admin:",
        "    if caller(request).is_admin is None:",
        "one client empties the cache of all",
        test=_TENANTS + "test_what_concerns_everybody_is_for_admin_keys_and_for_whoever_has_the_only_one",
    ),
)
