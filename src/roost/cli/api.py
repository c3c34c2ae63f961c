"""Api: a running server as commands talk to it, over HTTP and with nothing but the standard library.

Owns the address, the key and how refusals are read. Each call has a connection of its own, so any thread may call; a
stream that is left closes its connection, which ends the turn behind it. Called by `bench` and by `remote`.
"""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from roost.environment import api_keys
from roost.errors import CapacityError, ConfigError, RequestError

_TIMEOUT_S = 600
_ERROR_BYTES_MAX = 65536  # of a refusal's body that is read


class NotJson(ConfigError):
    """Something answers there that does not speak our language."""


class Api:
    """A server at a URL."""

    def __init__(self, url: str) -> None:
        try:
            place = urlsplit(url)
            self._host, self._port = place.hostname, place.port
        except ValueError as error:
            raise ConfigError(f"--url must be like http://host:port, got {url}") from error
        if place.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"--url must be like http://host:port, got {url}")
        self._base = place.path.rstrip("/").removesuffix("/v1")  # OpenAI's clients are given it with /v1
        self._secure = place.scheme == "https"
        keys = api_keys(())
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {keys[0]}"} if keys else {})

    def get(self, path: str) -> Any:
        """What a GET answers."""
        return self.ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What a POST answers."""
        return self.ask("POST", path, body)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request; a refusal is raised as the error that it says."""
        with self._asked(method, path, body) as response:
            return _json(response.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Any, None, None]:
        """The events that a POST answers with; one that is a refusal is raised."""
        with self._asked("POST", path, body) as response:
            for line in response:
                if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                    event = _json(line[len(b"data:") :])
                    if isinstance(event, dict) and "error" in event:
                        raise _refusal(event["error"].get("code") or 500, event)
                    yield event

    @contextmanager
    def _asked(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[HTTPResponse]:
        """The server's answer, to be read inside."""
        assert self._host is not None
        connection = (HTTPSConnection if self._secure else HTTPConnection)(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request(method, self._base + path, None if body is None else json.dumps(body), self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                text = response.read(_ERROR_BYTES_MAX)
                try:
                    said = json.loads(text)
                except ValueError:
                    said = {"error": {"message": text[:300].decode(errors="replace")}}
                raise _refusal(response.status, said)
            with response:  # one that the server closes behind itself is not the connection's any more
                yield response
        except (OSError, HTTPException) as error:
            raise ConfigError(f"--url: cannot reach {self._host}:{self._port}: {error!r}") from error
        finally:
            connection.close()


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotJson(f"--url: the server answers {text[:100]!r}, which is not JSON") from error


def _refusal(status: int, body: Any) -> RequestError | CapacityError:
    """A refusal as the error that the library would raise."""
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error if isinstance(error, dict) else {"message": str(error)[:300]}
    message, param = str(said.get("message") or said.get("detail") or said), said.get("param")
    if isinstance(status, int) and 400 <= status < 500 and status != 429:
        param = param or "the server"
        return RequestError(status, param, message.removeprefix(f"{param}: "))
    return CapacityError(status if isinstance(status, int) else 500, message)
