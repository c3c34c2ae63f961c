"""Keys: who a caller is, what it may do, and the file that says so.

With no key, or one on the command line, all callers are one client without a name, which owns everything. Otherwise
each key belongs to a named client with its own sessions, request ids, prefix cache and limits; admin keys may do what
affects all clients. Keys are compared in constant time and never printed. Called by the app and the command line.
"""

import hmac
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from starlette.requests import Request

from roost.clients import ClientLimits
from roost.config.options import EngineConfig
from roost.errors import ConfigError, RequestError
from roost.sched.intake import PRIORITY_MAX
from roost.server.config import ServerConfig, is_key

SESSION_TTL_S = 3600  # of a named client's sessions, where neither its limits nor --session-ttl-s set one
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_COUNTS = ("running", "queued", "sessions", "session_ttl_s")
_FIELDS = ("keys", "admin", "priority", *_COUNTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A caller, identified by its key."""

    name: str = ""
    is_admin: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A client, its keys, and its limits in the file."""

    client: Client
    keys: tuple[str, ...]
    limits: ClientLimits


class Keys:
    """All keys and their clients."""

    def __init__(self, holders: tuple[Holder, ...] = (), warning: str = "") -> None:
        self._holders = holders
        self.warning = warning  # for the operator

    @property
    def are_required(self) -> bool:
        """Whether callers must send a key."""
        return bool(self._holders)

    @property
    def names(self) -> str:
        """The clients' names, for display; '' where keys have no names."""
        clients = [holder.client for holder in self._holders if holder.client.name]
        return ", ".join(f"{client.name} (admin)" if client.is_admin else client.name for client in clients)

    def client_of(self, authorization: str) -> Client:
        """The client of an Authorization header, or 401; compares with every key, each in constant time."""
        if not self._holders:
            return Client()
        scheme, _, given = authorization.partition(" ")
        known = [holder.client for holder in self._holders for key in holder.keys if _is_same(given, key)]
        if scheme.lower() != "bearer" or not known:
            raise RequestError(401, "authorization", "must be 'Bearer' and an API key of this server")
        return known[0]

    def limits(self, engine: EngineConfig) -> tuple[ClientLimits, ...]:
        """The limits of each named client; by default an equal share of the sessions and of the queue."""
        named = [holder for holder in self._holders if holder.client.name]
        ttl_s = engine.session.session_ttl_s if engine.session.session_ttl_s is not None else SESSION_TTL_S
        usual = {
            "queued": max(1, engine.sched.max_queued // max(1, len(named))),
            "sessions": max(1, engine.session.max_sessions // max(1, len(named))),
            "session_ttl_s": ttl_s,
        }
        return tuple(_filled(holder, usual) for holder in named)


NO_KEYS = Keys()


def caller(request: Request) -> Client:
    """The client of a request, whose key the app has checked."""
    client: Client = request.state.client
    return client


def sent_key(headers: Mapping[str, str]) -> str:
    """A caller's key as an Authorization header has it; Anthropic's clients send it as x-api-key."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else "")


def check_admin(request: Request) -> None:
    """Refuse (403) an operation that affects all clients unless the caller is an admin."""
    if not caller(request).is_admin:
        raise RequestError(403, "authorization", f"{request.url.path} is for admin keys: it affects all clients")


def read_keys(config: ServerConfig) -> Keys:
    """The keys of the command line, or of the file it names; raises ConfigError if they are invalid."""
    if config.api_keys is None:
        return _numbered(tuple(dict.fromkeys(config.api_key)))
    if config.api_key:
        raise ConfigError("--api-keys and --api-key (or $ROOST_API_KEY) both say which keys there are; give one")
    path = Path(config.api_keys)
    try:
        with path.open("rb") as file:
            is_open = os.fstat(file.fileno()).st_mode & 0o077
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--api-keys {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not text; the message has the line number and none of the content
        raise ConfigError(f"--api-keys {path}: is not TOML: {error}") from error
    try:
        holders = tuple(_holder(name, table) for name, table in tables.items())
        _check_all(holders)
    except ValueError as error:
        raise ConfigError(f"--api-keys {path}: {error}") from error
    return Keys(holders, f"--api-keys {path} can be read by other users: chmod 600 {path}" if is_open else "")


def _is_same(given: str, key: str) -> bool:
    return hmac.compare_digest(given.encode(), key.encode())


def _numbered(keys: tuple[str, ...]) -> Keys:
    """Keys of the command line: a single one has no name; several are named in order, and the first is an admin's."""
    clients = [Client(name=f"key-{number}", is_admin=number == 1) for number in range(1, len(keys) + 1)]
    clients = [Client()] if len(keys) == 1 else clients
    return Keys(
        tuple(
            Holder(client=client, keys=(key,), limits=ClientLimits(name=client.name))
            for client, key in zip(clients, keys, strict=True)
        )
    )


def _filled(holder: Holder, usual: dict[str, int]) -> ClientLimits:
    """A client's limits, with defaults for those it has none of; without a range its priority is at most 0."""
    limits = holder.limits
    values = {each.name: getattr(limits, each.name) for each in fields(limits)}
    values |= {name: value for name, value in usual.items() if values[name] is None}
    if limits.priority_max is None and not holder.client.is_admin:
        values["priority_max"] = 0
    return ClientLimits(**values)


def _holder(name: str, table: Any) -> Holder:
    """One table of the file; raises ValueError with the field at fault."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"[{name[:64]!r}]: a name has 1 to 64 of A-Z a-z 0-9 . _ -")
    if not isinstance(table, dict):
        raise ValueError(f"{name} must be a table, [{name}], with {', '.join(_FIELDS)}")
    unknown = [field for field in table if field not in _FIELDS]
    if unknown:
        raise ValueError(f"{name}.{unknown[0]}: there are only {', '.join(_FIELDS)}")
    keys, is_admin = table.get("keys"), table.get("admin", False)
    if not (isinstance(keys, list) and keys and all(isinstance(key, str) and is_key(key) for key in keys)):
        raise ValueError(f"{name}.keys must be a list of keys, each of printable ASCII without spaces")
    if not isinstance(is_admin, bool):
        raise ValueError(f"{name}.admin must be true or false, got {is_admin!r}")
    for field in _COUNTS:
        if field in table and not (type(table[field]) is int and table[field] >= 1):
            raise ValueError(f"{name}.{field} must be a whole number of at least 1, got {table[field]!r}")
    low, high = _priorities(name, table.get("priority"))
    counts = {field: table.get(field) for field in _COUNTS}
    limits = ClientLimits(name=name, priority_min=low, priority_max=high, **counts)
    return Holder(client=Client(name=name, is_admin=is_admin), keys=tuple(dict.fromkeys(keys)), limits=limits)


def _priorities(name: str, given: Any) -> tuple[int | None, int | None]:
    if given is None:
        return None, None
    is_pair = isinstance(given, list) and len(given) == 2 and all(type(each) is int for each in given)
    if not (is_pair and -PRIORITY_MAX <= given[0] <= given[1] <= PRIORITY_MAX):
        raise ValueError(f"{name}.priority must be [least, most] in [-{PRIORITY_MAX}, {PRIORITY_MAX}], got {given!r}")
    return given[0], given[1]


def _check_all(holders: tuple[Holder, ...]) -> None:
    if not holders:
        raise ValueError('has no keys: write [name] and keys = ["…"] for each client')
    uses = Counter(key for holder in holders for key in holder.keys)
    shared = [holder.client.name for holder in holders if any(uses[key] > 1 for key in holder.keys)]
    if shared:
        raise ValueError(f"{' and '.join(shared)} have a key in common; each key must belong to one client")
