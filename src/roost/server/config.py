"""Configuration of the server: where it listens, who may use it, and how long anything may take.

Each field carries its help text; the command line is generated from them. Needs none of the server's packages.
"""

import re
from dataclasses import dataclass, field

from roost.config.options import at_least
from roost.errors import ConfigError
from roost.server.logs import FORMATS, TEXT, LogConfig
from roost.tools.model_formats import REASONING_FORMATS
from roost.tools.registry import DETECTED, tool_format_names

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
LOG_REQUESTS = ("all", "usual", "failed", "none")
CONNECTIONS_DEFAULT = 4096
RESTARTS_DEFAULT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and who may use it."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen at"})
    port: int = field(default=8000, metadata={"help": "port to listen at; 0: one that is free"})
    api_key: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "a key that callers must send; also $ROOST_API_KEY; given several times, each key is a client, "
            "named key-1, key-2, … in order, the first an admin (docs/KEYS.md)"
        },
    )
    api_keys: str | None = field(
        default=None, metadata={"help": "a TOML file with the keys, names and limits of clients (docs/KEYS.md)"}
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "what clients call the model, instead of its own name; may be given several times, or separated by "
            "commas: the first is shown, all are accepted"
        },
    )
    tool_format: str = field(
        default=DETECTED,
        metadata={
            "help": "how the model writes tool calls; auto: as its chat template does (docs/TOOLS.md)",
            "choices": tool_format_names(),
        },
    )
    reasoning_format: str = field(
        default=DETECTED,
        metadata={
            "help": "what reasoning stands between; auto: as the chat template has it; none: it is part of the content",
            "choices": REASONING_FORMATS,
        },
    )
    allow_host: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "a name that callers may use for this server besides localhost and --host, * for any; may be given "
            "several times; if absent, any name is accepted with API keys, and any address with --host 0.0.0.0"
        },
    )
    allow_origin: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "origin (https://name[:port]) of web pages that may use this server, * for any; may be given "
            "several times"
        },
    )
    header_s: int = field(default=10, metadata={"help": "seconds that a request's headers may take to arrive"})
    body_s: int = field(default=60, metadata={"help": "seconds that a request's body may take to arrive"})
    keep_alive_s: int = field(default=5, metadata={"help": "seconds that an idle connection is kept open"})
    max_connections: int | None = field(
        default=None,
        metadata={
            "help": f"most open connections; {CONNECTIONS_DEFAULT}, or what the limit of open files allows, if absent"
        },
    )
    max_connections_per_address: int | None = field(
        default=None,
        metadata={"help": "most of those from one address; no limit if absent, since a proxy has only one address"},
    )
    max_responses: int = field(
        default=1024, metadata={"help": "responses and conversations that are stored; the oldest are forgotten"}
    )
    max_response_mb: int = field(default=64, metadata={"help": "megabytes of those, at most"})
    response_ttl_s: int = field(default=3600, metadata={"help": "seconds that a response is stored"})
    drain_s: int = field(default=30, metadata={"help": "seconds that running requests get to finish on shutdown"})
    stall_s: int = field(default=60, metadata={"help": "seconds after which a client that reads nothing is dropped"})
    health_answer_s: int = field(
        default=10,
        metadata={"help": "seconds without an answer of the engine after which it is unhealthy; it may be in a step"},
    )
    health_step_s: int = field(
        default=60, metadata={"help": "seconds without a completed step, while there is work, until it is unhealthy"}
    )
    engine_restarts: int | None = field(
        default=None,
        metadata={
            "help": "how often within an hour an engine that ended unexpectedly is started again, until the server "
            f"ends with it; if absent {RESTARTS_DEFAULT} with --tp above 1 or --journal, else 0"
        },
    )
    log_level: str = field(
        default="warning", metadata={"help": "least severe messages that are logged", "choices": LOG_LEVELS}
    )
    live_text: bool = field(
        default=False, metadata={"help": "show the texts of drafted trees on the live page, which are parts of outputs"}
    )
    log_requests: str = field(
        default="usual",
        metadata={"help": "requests that are logged; usual: all but successful probes", "choices": LOG_REQUESTS},
    )
    otlp_endpoint: str | None = field(
        default=None,
        metadata={"help": "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request"},
    )
    log_format: str = field(
        default=TEXT, metadata={"help": "text, or JSON with an object in each line", "choices": FORMATS}
    )
    log_slow_s: int = field(
        default=30,
        metadata={"help": "seconds from which on an output's end is logged at info, like that of a failed one"},
    )

    @property
    def log(self) -> LogConfig:
        """How both processes log."""
        return LogConfig(level=self.log_level, format=self.log_format, slow_s=self.log_slow_s)


NAME_LEN_MAX = 256
_TIMES = ("header_s", "body_s", "keep_alive_s", "stall_s", "health_answer_s", "health_step_s")
_COUNTS = ("max_connections", "max_connections_per_address", "max_responses", "max_response_mb", "response_ttl_s")
_LEAST = {"drain_s": 0, "engine_restarts": 0, "log_slow_s": 0, **dict.fromkeys((*_TIMES, *_COUNTS), 1)}
_HOST = re.compile(r"\*|[A-Za-z0-9._-]+|[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?")
_COLLECTOR = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?(/[A-Za-z0-9._~/-]*)?")
_PORT_MAX = 65535


def is_key(text: str) -> bool:
    """Whether a text can be a key: it must be allowed in an HTTP header."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _is_collector(url: str) -> bool:
    found = _COLLECTOR.fullmatch(url)
    return found is not None and 1 <= int(found["port"] or 1) <= _PORT_MAX


def served_names(given: tuple[str, ...]) -> tuple[str, ...]:
    """The names of --served-model-name, split at commas, without duplicates."""
    return tuple(dict.fromkeys(name.strip() for names in given for name in names.split(",")))


def check_server(config: ServerConfig) -> None:
    """Raise ConfigError for the first option of a server that cannot work."""
    if not 0 <= config.port <= _PORT_MAX:
        raise ConfigError(f"--port must be in [0, {_PORT_MAX}], got {config.port}")
    if not all(is_key(key) for key in config.api_key):
        raise ConfigError("--api-key must have at least 1 character, all of them printable ASCII without spaces")
    if not all(0 < len(name) <= NAME_LEN_MAX and name.isprintable() for name in config.served_model_name):
        raise ConfigError(f"--served-model-name must have 1 to {NAME_LEN_MAX} characters, all of them printable")
    for flag, given, form, allowed in (
        ("--allow-host", config.allow_host, _HOST, "a name or an address without a port, or *"),
        ("--allow-origin", config.allow_origin, _ORIGIN, "https://name[:port] without a path, or *"),
    ):
        if wrong := [each for each in given if not form.fullmatch(each)]:
            raise ConfigError(f"{flag} must be {allowed}, got {wrong[0]!r}")
    if config.otlp_endpoint is not None and not _is_collector(config.otlp_endpoint):
        raise ConfigError(  # which does not repeat it: credentials may be in it
            f"--otlp-endpoint must be http://host[:port][/path] or https://…, with a port in [1, {_PORT_MAX}] and "
            "without a query; credentials go into $OTEL_EXPORTER_OTLP_HEADERS"
        )
    for name, least in _LEAST.items():
        if (value := getattr(config, name)) is not None:
            at_least("--" + name.replace("_", "-"), value, least)
    for flag, value, choices in (
        ("--tool-format", config.tool_format, tool_format_names()),
        ("--reasoning-format", config.reasoning_format, REASONING_FORMATS),
        ("--log-level", config.log_level, LOG_LEVELS),
        ("--log-requests", config.log_requests, LOG_REQUESTS),
        ("--log-format", config.log_format, FORMATS),
    ):
        if value not in choices:
            raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value}")
