"""Remote sessions: chat with a running server through the interface that the library has for an engine in this process.

Where the server has /v1/sessions, each conversation is a session there: a turn sends only what is new, and an abandoned
answer is rolled back. Any other server with OpenAI's API is sent the whole conversation in each turn; its history is
kept on this side. Called by `chat`.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

from roost.cli.http_client import HttpClient
from roost.errors import CapacityError, ConfigError, RequestError
from roost.front import speculation
from roost.front.answer import Piece
from roost.front.options import OPENAI_NAMES, Options
from roost.library.session import Messages
from roost.messages import Finished, PoolStats, SessionState, SpecStats, Stats, Usage

_POLL_S = 0.02  # how often an abandoned turn is polled
_ABANDONED_S_MAX = 10.0  # and for how long
_UNSUPPORTED = ("no_stop_trim", "n", "logprobs", "prompt_logprobs_from")  # in a chat


class RemoteServer:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._http = HttpClient(url)
        try:
            self.name = str(self._http.get("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--url: {url} lists no models under /v1/models") from error

    def session(self) -> "RemoteSession | ClientSideSession":
        """A new session."""
        try:
            return RemoteSession(self._http, self._http.post("/v1/sessions", {})["id"])
        except RequestError as error:
            if error.status not in (404, 405):
                raise
            return ClientSideSession(self._http, self.name)

    def stats(self) -> Stats | None:
        """The statistics of the server's engine; None if it does not report them."""
        try:
            stats = self._http.get("/server_info")["stats"]
            stats |= {
                "pools": [PoolStats(**pool) for pool in stats["pools"]],
                "spec": speculation.from_json(stats["spec"]),
            }
            return Stats(**{field.name: stats[field.name] for field in fields(Stats)})
        except (RequestError, KeyError, TypeError):
            return None  # not a Roost server


class RemoteSession:
    """A session under the server's /v1/sessions."""

    def __init__(self, http: HttpClient, session_id: str) -> None:
        self._http = http
        self._path = f"/v1/sessions/{session_id}"
        self._is_abandoned = False  # whether a turn was abandoned that the server may still run
        self.id = session_id

    def chat(self, messages: Messages, options: Options) -> Generator[Piece, None, None]:
        """Pieces of the answer to new messages; leaving the loop undoes the turn."""
        body = {"messages": list(messages), "stream": True, **_body(options)}
        self._is_abandoned = True
        finished = None
        with closing(self._http.stream(f"{self._path}/generate", body)) as events:
            for event in events:
                finished = _finished(event)
                yield Piece(text=event["text"], tokens=tuple(event["output_ids"]), finished=finished)
        if finished is None:
            raise CapacityError(503, "the server ended the answer before it was done")
        self._is_abandoned = False

    def rewind(self, *, turn: int) -> SessionState:
        """Keep only the first `turn` turns."""
        self._settle()
        return _state(self._http.post(f"{self._path}/rewind", {"turn": turn}))

    def fork(self) -> "RemoteSession":
        """A copy that continues from here; this session is not changed."""
        self._settle()
        return RemoteSession(self._http, self._http.post(f"{self._path}/fork", {})["id"])

    def state(self) -> SessionState:
        """The session's state, once an abandoned turn has been undone."""
        self._settle()
        return _state(self._http.get(self._path))

    def close(self) -> None:
        """Close the session."""
        try:
            self._http.ask("DELETE", self._path)
        except RequestError as error:
            if error.status not in (404, 410):  # its ttl may be over
                raise

    def _settle(self) -> None:
        """Wait until an abandoned turn has ended: the server notices by itself that its client has disconnected."""
        ends_at = time.monotonic() + _ABANDONED_S_MAX
        while self._is_abandoned and time.monotonic() < ends_at:
            self._is_abandoned = self._http.get(self._path)["state"] in ("waiting", "running")
            if self._is_abandoned:
                time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTurn:
    """One turn, and the length of the conversation after it."""

    messages: tuple[dict[str, Any], ...]  # including the answer
    length: int  # in tokens


class ClientSideSession:
    """A session whose history is kept on this side, for a server without sessions."""

    def __init__(self, http: HttpClient, model: str, turns: Sequence[_StoredTurn] = ()) -> None:
        self._http = http
        self._model = model
        self._turns = list(turns)
        self.id = "kept here"

    def chat(self, messages: Messages, options: Options) -> Generator[Piece, None, None]:
        """Pieces of the answer to new messages; leaving the loop undoes the turn."""
        whole = [message for turn in self._turns for message in turn.messages] + list(messages)
        body = {"model": self._model, "messages": whole, "stream": True, "stream_options": {"include_usage": True}}
        text, reason, usage = "", "stop", Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        with closing(self._http.stream("/v1/chat/completions", {**body, **_body(options)})) as events:
            for event in events:
                for choice in event["choices"][:1]:
                    new = choice["delta"].get("content") or ""
                    text, reason = text + new, choice.get("finish_reason") or reason
                    yield Piece(text=new)
                usage = _usage(event["usage"]) if event.get("usage") else usage
        length = usage.prompt_tokens + usage.completion_tokens
        self._turns.append(_StoredTurn(messages=(*messages, {"role": "assistant", "content": text}), length=length))
        yield Piece(finished=_end(reason, usage, SpecStats()))

    def rewind(self, *, turn: int) -> SessionState:
        """Keep only the first `turn` turns."""
        del self._turns[turn:]
        return self.state()

    def fork(self) -> "ClientSideSession":
        """A copy that continues from here; this session is not changed."""
        return ClientSideSession(self._http, self._model, self._turns)

    def state(self) -> SessionState:
        """The session's state."""
        length = self._turns[-1].length if self._turns else 0
        return _state({"id": self.id, "length": length, "turns": len(self._turns)})

    def close(self) -> None:
        """Forget the history."""
        self._turns.clear()


def _body(options: Options) -> dict[str, Any]:
    """Options as fields of OpenAI's bodies; defaults are left out, since not every server knows all fields."""
    usual, body = Options(), {}
    for field in fields(Options):
        name, value = field.name, getattr(options, field.name)
        if value == getattr(usual, name):
            continue
        if name in _UNSUPPORTED:
            raise RequestError(400, name, "is not supported in a chat with a running server")
        body[OPENAI_NAMES.get(name, name)] = dict(value) if name == "logit_bias" else value
    return body


def _finished(event: dict[str, Any]) -> Finished | None:
    """How a turn ended, if this event says so."""
    if event.get("finish_reason") is None:
        return None
    if event["finish_reason"] not in ("stop", "length"):
        raise CapacityError(500, f"the server ended the turn: {event['finish_reason']}")
    return _end(event["finish_reason"], _usage(event["usage"]), speculation.from_json(event["spec"]))


def _end(reason: str, usage: Usage, spec: SpecStats) -> Finished:
    return Finished(request_id="", reason=reason, usage=usage, max_new_tokens=0, spec=spec)


def _usage(usage: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage["completion_tokens"],
    )


def _state(body: dict[str, Any]) -> SessionState:
    limits = body.get("limits") or {}
    ttl_s = limits.get("ttl_s")
    return SessionState(
        session_id=body["id"],
        length=body["length"],
        resident=body.get("resident", 0),
        turns=body["turns"],
        state=body.get("state", "idle"),
        idle_ms=int(body.get("idle_s", 0) * 1000),
        ttl_ms=None if ttl_s is None else int(ttl_s * 1000),
        max_tokens=limits.get("max_tokens"),
        cache_salt=body.get("salt", ""),
    )
