"""Planted bugs where clients meet the server: time, room, names, and what is written of them."""

from tests.planted.bug import Bug

EDGE_BUGS = (
    Bug(
        "edge_drip_wins_no_time",
        "roost.server.connection",
        "        if self._since == (phase, self.cycle):",
        "        if self._since is phase:",
        "each byte that drips in starts the time for headers or body again",
        "tests/unit/server/test_connection.py::test_bytes_that_drip_win_no_time",
    ),
    Bug(
        "edge_workers_stay",
        "roost.server.connections",
        "            waiting.pop(connection, None)",
        "            waiting.get(connection, None)",
        "a request at work is made to leave, as if it were still waited for",
        "tests/unit/server/test_connections.py::test_the_longest_waiting_leaves_and_who_sends_a_body_after_all_others",
    ),
    Bug(
        "edge_probe_slots_kept",
        "roost.server.connections",
        "        return self.num_open >= self.num_slots + PROBE_SLOTS",
        "        return self.num_open >= self.num_slots",
        "when all connections are at work nobody can ask whether the server is well",
        "tests/unit/server/test_connections.py::test_when_all_are_at_work_newcomers_get_probe_slots_and_then_nothing",
    ),
    Bug(
        "edge_sends_at_once",
        "roost.server.listener",
        "        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else the loop sends late",
        "        super().__init__(family, socket.SOCK_STREAM)",
        "the end of every answer waits for a client's delayed acknowledgement, some 40 ms",
        "tests/unit/server/test_connection.py::test_what_is_said_is_sent_at_once_and_not_when_the_last_was_confirmed",
    ),
    Bug(
        "edge_reads_have_a_host",
        "roost.server.host_check",
        '        if not self._hosts.has(headers.get("host")):',
        '        if scope["method"] not in ("GET", "HEAD") and not self._hosts.has(headers.get("host")):',
        "a page that takes the server's address for its own name reads sessions and metrics",
        "tests/unit/server/test_host_check.py::test_whatever_is_asked_by_another_name_is_refused",
    ),
    Bug(
        "edge_log_escapes",
        "roost.server.logs",
        '    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)',
        "    return text",
        "a client's path writes lines of its own into the log",
        "tests/unit/server/test_logs.py::test_nothing_that_a_client_sent_begins_a_line_or_steers_a_terminal",
    ),
    Bug(
        "edge_reported_once",
        "roost.server.request_log",
        '            _log.exception("%s %s failed", _method(scope), _short(scope["path"]))',
        "            raise",
        "what breaks is reported by uvicorn, which does not know for whom",
        "tests/unit/server/test_connection.py::test_a_bug_is_reported_once_with_the_path_of_its_request",
    ),
)
