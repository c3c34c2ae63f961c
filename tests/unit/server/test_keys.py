"""Keys: whose they are, what a file of them may say, and what each may take where it says nothing."""

from pathlib import Path

import pytest

from roost.clients import ClientLimits
from roost.config.options import EngineConfig, SchedConfig, SessionConfig
from roost.errors import ConfigError, RequestError
from roost.server.config import ServerConfig
from roost.server.keys import SESSION_TTL_S, Client, Keys, read_keys

GOOD = """
[alice]
keys = ["a-old", "a-new"]
admin = true

[bob]
keys = ["b"]
running = 2
queued = 3
sessions = 4
session_ttl_s = 5
priority = [-6, 7]

[carol]
keys = ["c"]
"""
ENGINE = EngineConfig(sched=SchedConfig(max_queued=100), session=SessionConfig(max_sessions=10))


def written(folder: Path, text: str, mode: int = 0o600) -> Keys:
    """The keys of a file."""
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return read_keys(ServerConfig(api_keys=str(path)))


def test_one_key_or_none_has_no_name_and_no_limits() -> None:
    for given in ((), ("one",), ("one", "one")):
        keys = read_keys(ServerConfig(api_key=given))
        assert keys.client_of("Bearer one") == Client(name="", is_admin=True)
        assert (keys.names, keys.limits(ENGINE)) == ("", ())


def test_several_keys_on_the_command_line_are_named_by_their_order_and_the_first_is_an_admins() -> None:
    keys = read_keys(ServerConfig(api_key=("x", "y")))
    assert keys.client_of("Bearer x") == Client(name="key-1", is_admin=True)
    assert keys.client_of("Bearer y") == Client(name="key-2", is_admin=False)
    assert keys.names == "key-1 (admin), key-2"


def test_a_file_names_keys_and_several_may_be_one_clients(tmp_path: Path) -> None:
    keys = written(tmp_path, GOOD)
    assert {keys.client_of(f"Bearer {key}").name for key in ("a-old", "a-new")} == {"alice"}
    assert keys.client_of("Bearer a-new").is_admin and not keys.client_of("Bearer b").is_admin
    assert keys.names == "alice (admin), bob, carol"
    with pytest.raises(RequestError):
        keys.client_of("Bearer nobody")


def test_where_nothing_is_said_sessions_and_queue_are_shared_equally_and_nobody_goes_before_others(
    tmp_path: Path,
) -> None:
    alice, bob, carol = written(tmp_path, GOOD).limits(ENGINE)
    assert alice == ClientLimits(name="alice", queued=33, sessions=3, session_ttl_s=SESSION_TTL_S)
    assert carol == ClientLimits(name="carol", queued=33, sessions=3, session_ttl_s=SESSION_TTL_S, priority_max=0)
    own = {"running": 2, "queued": 3, "sessions": 4, "session_ttl_s": 5, "priority_min": -6, "priority_max": 7}
    assert bob == ClientLimits(name="bob", **own)
    told = EngineConfig(sched=SchedConfig(max_queued=2), session=SessionConfig(max_sessions=1, session_ttl_s=60))
    carol = written(tmp_path, GOOD).limits(told)[2]
    assert (carol.queued, carol.sessions, carol.session_ttl_s) == (1, 1, 60), "at least one each"


WRONG = {
    "": "no keys",
    "alice = 1": "alice must be a table",
    "keys = ['a']": "keys must be a table",
    "[alice]": "alice.keys",
    "[alice]\nkeys = []": "alice.keys",
    "[alice]\nkeys = 's3cret'": "alice.keys",
    "[alice]\nkeys = ['s3cret two']": "alice.keys",
    "[alice]\nkeys = ['s3cret', 7]": "alice.keys",
    "['al ice']\nkeys = ['s3cret']": "al ice",
    "[alice]\nkeys = ['s3cret']\nadmin = 1": "alice.admin",
    "[alice]\nkeys = ['s3cret']\nrunning = 0": "alice.running must be a whole number of at least 1, got 0",
    "[alice]\nkeys = ['s3cret']\nqueued = true": "alice.queued",
    "[alice]\nkeys = ['s3cret']\nsessions = 1.5": "alice.sessions",
    "[alice]\nkeys = ['s3cret']\nsession_ttl_s = '9'": "alice.session_ttl_s",
    "[alice]\nkeys = ['s3cret']\npriority = 3": "alice.priority",
    "[alice]\nkeys = ['s3cret']\npriority = [3, 2]": "alice.priority",
    "[alice]\nkeys = ['s3cret']\npriority = [0, 3000000000]": "alice.priority",
    "[alice]\nkeys = ['s3cret']\nruning = 3": "alice.runing: there are only keys, admin, priority, running",
    "[alice]\nkeys = ['s3cret']\n[bob]\nkeys = ['s3cret']": "alice and bob have a key in common",
    "[alice]\nkeys == ['s3cret']\n": "line 2",
    "[alice]\nkeys = ['s3cret']\nkeys = ['other']\n": "line 3",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_cannot_work_is_refused_by_line_or_field_and_no_key_is_shown(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        written(tmp_path, text)
    message = str(caught.value)
    assert message.startswith("--api-keys") and "keys.toml" in message and WRONG[text] in message
    assert "s3cret" not in message


def test_a_file_that_is_not_there_or_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ServerConfig(api_keys=str(tmp_path / "none.toml")))
    (tmp_path / "keys.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_keys(ServerConfig(api_keys=str(tmp_path / "keys.toml")))
    with pytest.raises(ConfigError, match="--api-key "):
        read_keys(ServerConfig(api_keys=str(tmp_path / "keys.toml"), api_key=("a",)))


def test_who_can_read_the_file_is_said(tmp_path: Path) -> None:
    assert written(tmp_path, GOOD).warning == ""
    for mode in (0o640, 0o604):
        assert "chmod 600" in written(tmp_path, GOOD, mode).warning
