"""An engine that does not answer in time: a session command that was told so has not happened, whenever it goes on."""

import os
import signal
from typing import Any

import httpx

from tests.server.conftest import StartTiny
from tests.server.test_ends import in_background
from tests.server.test_sessions import SHORT, Client
from tests.support.server_process import wait_until

TURN = {**SHORT, "text": "hello", "ignore_eos": True}


def test_a_session_command_that_was_answered_503_is_not_carried_out(start_tiny: StartTiny) -> None:
    server = start_tiny("--health-answer-s", "1", "--session-ttl-s", "600")
    rewound, forked, closed = (Client(server, id=name) for name in ("rewound", "forked", "closed"))
    for session in (rewound, forked, closed):
        session.do("generate", TURN)
    before = {session.id: session.state() for session in (rewound, forked, closed)}
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        commands: dict[str, tuple[str, str, Any]] = {
            "open": ("POST", "/v1/sessions", {"id": "new"}),
            "open without a name": ("POST", "/v1/sessions", {}),
            "native": ("POST", "/open_session", {"capacity_of_str_len": 1, "session_id": "native"}),
            "rewind": ("POST", f"{rewound.path}/rewind", {"turn": 0}),
            "fork": ("POST", f"{forked.path}/fork", {"id": "copy"}),
            "close": ("DELETE", closed.path, None),
            "flush": ("POST", "/flush_cache", None),
        }
        waiting = [in_background(lambda each=each: _sent(server.url, *each)) for each in commands.values()]
        assert [answer().status_code for answer in waiting] == [503] * len(commands)
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    wait_until(lambda: server.http.get("/health").status_code == 200)
    listed = {each["id"]: each for each in server.http.get("/v1/sessions").json()["data"]}
    assert set(listed) == set(before), "nothing was opened, forked or closed"
    for name, state in before.items():
        assert (listed[name]["turns"], listed[name]["length"]) == (state["turns"], state["length"]), name
    for session in (rewound, forked, closed):  # what comes next is made of what the engine has
        assert session.do("generate", TURN)["session"]["turns"] == 2
    assert rewound.do("rewind", {"turn": 1})["length"] == before["rewound"]["length"]
    sessions = [rewound, forked, closed]
    sessions += [Client(server, id="new"), Client(server, server.post(f"{forked.path}/fork", {"id": "copy"}))]
    assert server.post("/open_session", {"capacity_of_str_len": 1, "session_id": "native"}).status_code == 200
    assert server.post("/close_session", {"session_id": "native"}).status_code == 200
    assert [session.close().status_code for session in sessions] == [200] * len(sessions)
    server.check_rest()


def _sent(url: str, method: str, path: str, body: Any) -> httpx.Response:
    return httpx.request(method, url + path, json=body, timeout=None)
