"""HTTP client: a running server as the commands talk to it, with nothing but the standard library.

Owns the address, the key and how error responses are read. Each call has a connection of its own, so any thread may
call; a stream that is abandoned closes its connection, which aborts the turn behind it. Called by `bench`, `pages`,
`remote_sessions` and `top`.
"""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from roost.environment import api_key
from roost.errors import CapacityError, ConfigError, RequestError, RoostError
from roost.server.logs import printable

_TIMEOUT_S = 600
_SILENCE_S = 20  # of a stream of frames, which has a ping at least
_ERROR_BYTES_MAX = 65536  # of an error response, at most so much is read


class NotJson(ConfigError):
    """The server's answer is not JSON, so it is something else."""


class Unreachable(ConfigError):
    """No server answers, or it has stopped doing so."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say of a server's refusal what somebody who wants `what` can do about it."""
    try:
        yield
    except Unreachable as error:
        raise RoostError(
            f"{error}: is a server running there? `roost serve` starts one, --url says where it is"
        ) from error
    except NotJson as error:
        raise RoostError(f"{printable(str(error))}: it is no Roost server, or too old to have {what}") from error
    except CapacityError as error:
        raise RoostError(f"the server cannot do it now: {printable(str(error))}") from error
    except RequestError as error:
        said = printable(error.reason)
        match error.status:
            case 401:
                said = f"the server asks for a key: put one of its API keys into $ROOST_API_KEY ({said})"
            case 403:
                said = f"the server refuses: {said}"
            case 404 | 405:
                said = f"the server has no {what}: it is no Roost server, or too old ({said})"
        raise RoostError(said) from error


class HttpClient:
    """A server at a URL."""

    def __init__(self, url: str) -> None:
        try:
            place = urlsplit(url)
            self._host, self._port = place.hostname, place.port
        except ValueError as error:
            raise ConfigError(f"--url must be like http://host:port, got {url}") from error
        if place.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"--url must be like http://host:port, got {url}")
        self._base = place.path.rstrip("/").removesuffix("/v1")  # OpenAI's base URLs end in /v1
        self._secure = place.scheme == "https"
        key = api_key()
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> Any:
        """The response to a GET."""
        return self.ask("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The response to a POST."""
        return self.ask("POST", path, body)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The response to a request; an error response is raised as the matching error."""
        with self._request(method, path, body) as response:
            return _json(response.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[Any, None, None]:
        """The events that a POST streams; an error event is raised."""
        with self._request("POST", path, body) as response:
            yield from _events(response)

    def watch(self, path: str) -> Generator[Any, None, None]:
        """The events of a stream without an end, which is never silent for long while its server is well."""
        with self._request("GET", path, None, _SILENCE_S) as response:
            if response.headers.get_content_type() != "text/event-stream":
                raise NotJson(f"--url: the server's {path} is {response.headers.get_content_type()[:100]}")
            yield from (event for event in _events(response) if event is not None)  # null: it has ended at once

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float = _TIMEOUT_S
    ) -> Iterator[HTTPResponse]:
        """The server's response, to be read inside the context."""
        assert self._host is not None
        connection = (HTTPSConnection if self._secure else HTTPConnection)(self._host, self._port, timeout=timeout_s)
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
            with response:  # after "connection: close" the connection does not own the response any more
                yield response
        except (OSError, HTTPException) as error:
            raise Unreachable(f"--url: cannot reach {self._host}:{self._port}: {error!r}") from error
        finally:
            connection.close()


def _events(response: HTTPResponse) -> Generator[Any, None, None]:
    """The events of a stream; an error event is raised."""
    for line in response:
        if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
            event = _json(line[len(b"data:") :])
            if isinstance(event, dict) and "error" in event:
                raise _refusal(event["error"].get("code") or 500, event)
            yield event


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise NotJson(f"--url: the server answers {text[:100]!r}, which is not JSON") from error


def _refusal(status: int, body: Any) -> RequestError | CapacityError:
    """An error response as the error that the library would raise."""
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error if isinstance(error, dict) else {"message": str(error)[:300]}
    message, param = str(said.get("message") or said.get("detail") or said), said.get("param")
    if isinstance(status, int) and 400 <= status < 500 and status != 429:
        param = param or "the server"
        return RequestError(status, param, message.removeprefix(f"{param}: "))
    return CapacityError(status if isinstance(status, int) else 500, message)
