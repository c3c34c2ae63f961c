"""Options of a server that cannot work are said at once."""

import subprocess
import sys
from typing import Any

import pytest

from roost.errors import ConfigError
from roost.server.config import ServerConfig, check_server

WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"port": -1}, "--port"),
    ({"port": 65536}, "--port"),
    *(({"otlp_endpoint": f"http://a:{port}"}, "--otlp-endpoint") for port in ("0", "65536", "99999", "4" * 5000)),
    ({"api_key": ("",)}, "--api-key"),
    ({"api_key": ("good", "b d")}, "--api-key"),
    ({"api_key": ("schlüssel",)}, "--api-key"),
    ({"drain_s": -1}, "--drain-s"),
    ({"stall_s": 0}, "--stall-s"),
    ({"health_answer_s": 0}, "--health-answer-s"),
    ({"health_step_s": 0}, "--health-step-s"),
    ({"log_level": "loud"}, "--log-level"),
    ({"log_requests": "some"}, "--log-requests"),
    ({"log_format": "xml"}, "--log-format"),
    ({"log_slow_s": -1}, "--log-slow-s"),
    ({"header_s": 0}, "--header-s"),
    ({"body_s": 0}, "--body-s"),
    ({"keep_alive_s": 0}, "--keep-alive-s"),
    ({"max_connections": 0}, "--max-connections"),
    ({"max_connections_per_address": 0}, "--max-connections-per-address"),
    *(({"allow_host": (each,)}, "--allow-host") for each in ("", "http://a", "a:80", "[::1]", "a/b", "*.a")),
    *(({"allow_origin": (each,)}, "--allow-origin") for each in ("", "a.example", "https://a/", "null", "https://a b")),
)


@pytest.mark.parametrize(("options", "flag"), WRONG)
def test_an_option_that_cannot_work_is_named(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check_server(ServerConfig(**options))


def test_the_usual_options_work() -> None:
    check_server(ServerConfig())
    check_server(ServerConfig(port=0, api_key=("sk-1", "sk-2"), drain_s=0))
    check_server(ServerConfig(port=65535, otlp_endpoint="https://[::1]:65535/v1/traces"))
    check_server(ServerConfig(otlp_endpoint="http://collector:1"))
    check_server(ServerConfig(allow_host=("*", "a.example", "10.0.0.1", "fd00::1"), max_connections=1))
    check_server(ServerConfig(allow_origin=("*", "https://a.example:8443", "http://[::1]:3000", "app://a")))


def test_the_servers_own_process_does_not_load_what_runs_models() -> None:
    code = "import sys, roost.cli.serve, roost.server.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
