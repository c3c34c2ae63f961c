"""Planted bugs of conversations: what a request is told when it begins, forks of committed turns, labels, responses."""

from tests.planted.bug import Bug

_TABLE, _SESSIONS, _ADMISSION = "roost.session.table", "roost.sched.sessions", "roost.sched.admission"
_SERVER = "roost.server.conversations"
_UNIT = "tests/unit/server/test_conversations.py::"
_SOCKET = "tests/unit/server/test_response_socket.py::"

CONVERSATION_BUGS = (
    Bug(
        "begun_once",
        _ADMISSION,
        "    is_first = request.cached_len < 0",
        "    is_first = True",
        "a preempted request is told a second time that it begins",
    ),
    Bug(
        "begun_with_its_history",
        _ADMISSION,
        "        prompt_len = request.turn.prompt_len",
        "        prompt_len = len(request.submit.tokens)",
        "a turn begins with the tokens of its input alone",
    ),
    Bug(
        "fork_of_what_is_committed",
        _SESSIONS,
        "    return turn.commit_len if turn is not None and turn.started else len(session.record)",
        "    return len(session.record)",
        "a fork may end among the tokens of a turn that runs",
    ),
    Bug(
        "fork_at_its_turn",
        _TABLE,
        "            record=session.record.copy(length),",
        "            record=session.record.copy(len(session.record)),",
        "a fork of an earlier turn has what was said later",
    ),
    Bug(
        "shared_turns_are_published",
        _TABLE,
        "            elif session.shares:",
        "            elif False:",
        "a fork of a session whose turn runs finds nothing in the prefix cache",
    ),
    Bug(
        "session_that_has_gone_on",
        _SERVER,
        "    if common_prefix_len(session.client_session.tokens, tokens[:-1]) == turn.length_before:",
        "    if turn.length_before >= 0:",
        "a turn goes on after tokens that are not its conversation's",
        _UNIT + "test_a_session_that_has_gone_on_meanwhile_is_not_used",
    ),
    Bug(
        "second_child_in_a_fork",
        _SERVER,
        "        if is_kept and is_free and common_len == len(held):",
        "        if is_kept and is_free:",
        "a second child of a response goes on after the first one",
        _UNIT + "test_a_response_goes_on_in_place_and_a_second_child_in_a_fork",
    ),
    Bug(
        "not_stored_in_a_fork",
        _SERVER,
        "        if is_kept and is_free and common_len == len(held):",
        "        if is_free and common_len == len(held):",
        "a response that is not stored becomes the history of the one that it follows",
        _UNIT + "test_what_is_not_stored_leaves_the_session_as_it_was",
    ),
    Bug(
        "earlier_turns_stay",
        _SERVER,
        "        if after is None and is_free and last_turn_at is not None and common_len >= last_turn_at.length:",
        "        if after is None and is_free:",
        "a helper that goes back under its agent's label rewinds the agent's session",
        _UNIT + "test_a_last_turn_that_is_said_differently_is_rewound_and_an_earlier_one_forked",
    ),
    Bug(
        "room_for_others",
        _SERVER,
        "    for session in idle[: max(0, len(idle) + 1 - most)]:",
        "    for session in idle[:0]:",
        "conversations take every session that there may be",
        _UNIT + "test_conversations_take_half_of_the_sessions_and_the_least_recently_used_goes_first[6]",
    ),
    Bug(
        "abandoned_session_is_closed",
        "roost.server.session_uses",
        "            self._close(*key)",
        "            pass",
        "19: a reader that leaves its first response leaves a session behind",
        _UNIT + "test_a_reader_that_leaves_leaves_no_session_behind",
    ),
    Bug(
        "running_turn_is_a_use",
        _SERVER,
        "        uses.add(session.key)  # until the engine's last event, whoever else forgets it meanwhile",
        "        uses.add(session.key); uses.add(session.key); uses.drop(session.key); uses = SessionUses(print)",
        "a label that moves on ends the turn that runs in its session",
        _UNIT + "test_a_label_with_many_helpers_ends_none_of_them",
    ),
    Bug(
        "label_of_a_client",
        "roost.server.labels",
        "        return self._labels.get((client, short_label(label)), []) if label else []",
        "        return next((ids for (_, each), ids in self._labels.items() if each == short_label(label)), [])",
        "27: a label finds another key's session",
        "tests/unit/server/test_labels.py::test_a_label_is_its_clients_own_and_none_is_no_label",
    ),
    Bug(
        "answer_of_its_client",
        "roost.front.own_answers",
        '        begin = found = _digest(b"", [client, cache_salt, listed])',
        '        begin = found = _digest(b"", [listed])',
        "27: an answer's tokens are taken from another client's conversation",
        "tests/unit/front/test_own_answers.py::test_an_answer_belongs_to_its_client_its_salt_and_its_tools",
    ),
    Bug(
        "lane_in_order",
        "roost.server.response_socket",
        "        if lane not in self._lanes:",
        "        if True:",
        "two responses of one lane run at once",
        _SOCKET + "test_a_lane_is_in_order_and_lanes_run_beside_each_other",
    ),
    Bug(
        "dead_socket_aborts",
        "roost.server.response_socket",
        '                raise WebSocketDisconnect(message.get("code", _GOING_AWAY))  # ends the lanes too',
        "                return",
        "18: what a dead socket has asked for runs on to its end",
        _SOCKET + "test_a_socket_that_is_cut_after_any_event_leaves_nothing_behind[0]",
    ),
    Bug(
        "anothers_response",
        "roost.server.response_store",
        "        return None if shelf is None else shelf.kept.get(id)",
        "        return next((each.kept[id] for each in self._shelves.values() if id in each.kept), None)",
        "27: whoever knows a response's id can follow it",
        "tests/unit/server/test_stored_responses.py::"
        "test_anothers_responses_and_conversations_are_as_if_they_did_not_exist",
    ),
)
