"""Remote: conversations with a running server, as the library has them with an engine in this process.

Where the server has sessions (/v1/sessions) each conversation is one: a turn sends only what is new, and an answer that
is left is rolled back there. Any other server that speaks OpenAI's API is sent the whole conversation each time, which
is kept here. Called by `chat`.
"""

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

from roost.cli.api import Api
from roost.errors import CapacityError, ConfigError, RequestError
from roost.front import speculation
from roost.front.answer import Piece
from roost.front.options import Options
from roost.library.session import Messages
from roost.messages import Finished, PoolStats, SessionState, SpecStats, Stats, Usage

_LEFT_S = 0.02  # between two looks at a turn that was left
_LEFT_S_MAX = 10.0
_NAMES = {  # of options, where OpenAI's bodies have others
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "timeout_s": "timeout",
}
_UNSAID = ("no_stop_trim", "n", "logprobs", "prompt_logprobs_from")  # of no use to a conversation


class Remote:
    """A running server."""

    def __init__(self, url: str) -> None:
        self._api = Api(url)
        try:
            self.name = str(self._api.get("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"--url: {url} lists no models under /v1/models") from error

    def session(self) -> "RemoteSession | WholeSession":
        """A new conversation."""
        try:
            return RemoteSession(self._api, self._api.post("/v1/sessions", {})["id"])
        except RequestError as error:
            if error.status not in (404, 405):
                raise
            return WholeSession(self._api, self.name)

    def stats(self) -> Stats | None:
        """How things stand in the server's engine; None if it does not say."""
        try:
            said = self._api.get("/server_info")["stats"]
            said |= {
                "pools": [PoolStats(**pool) for pool in said["pools"]],
                "spec": speculation.from_json(said["spec"]),
            }
            return Stats(**{field.name: said[field.name] for field in fields(Stats)})
        except (RequestError, KeyError, TypeError):
            return None  # not one of ours


class RemoteSession:
    """A session of the server's."""

    def __init__(self, api: Api, session_id: str) -> None:
        self._api = api
        self._path = f"/v1/sessions/{session_id}"
        self._is_left = False  # whether a turn was left that may not have ended there
        self.id = session_id

    def chat(self, messages: Messages, options: Options) -> Generator[Piece, None, None]:
        """Pieces of the answer to new messages; leaving the loop undoes the turn."""
        body = {"messages": list(messages), "stream": True, **_body(options)}
        self._is_left = True
        finished = None
        with closing(self._api.stream(f"{self._path}/generate", body)) as events:
            for event in events:
                finished = _finished(event)
                yield Piece(text=event["text"], tokens=tuple(event["output_ids"]), finished=finished)
        if finished is None:
            raise CapacityError(503, "the server ended the answer before it was done")
        self._is_left = False

    def rewind(self, *, turn: int) -> SessionState:
        """Cut the session back to so many turns."""
        self._settle()
        return _state(self._api.post(f"{self._path}/rewind", {"turn": turn}))

    def fork(self) -> "RemoteSession":
        """Another session that goes on from here; this one stays."""
        self._settle()
        return RemoteSession(self._api, self._api.post(f"{self._path}/fork", {})["id"])

    def state(self) -> SessionState:
        """How the session stands; a turn that was left has been undone."""
        self._settle()
        return _state(self._api.get(self._path))

    def close(self) -> None:
        """Forget the session."""
        try:
            self._api.ask("DELETE", self._path)
        except RequestError as error:
            if error.status not in (404, 410):  # its time may have been up
                raise

    def _settle(self) -> None:
        """See a turn that was left to its end: the server notices by itself that its reader has gone."""
        ends_at = time.monotonic() + _LEFT_S_MAX
        while self._is_left and time.monotonic() < ends_at:
            self._is_left = self._api.get(self._path)["state"] in ("waiting", "running")
            if self._is_left:
                time.sleep(_LEFT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """One turn, and how long the conversation was after it."""

    messages: tuple[dict[str, Any], ...]  # the answer too
    length: int  # in tokens


class WholeSession:
    """A conversation that is kept here, for a server without sessions."""

    def __init__(self, api: Api, model: str, said: Sequence[_Said] = ()) -> None:
        self._api = api
        self._model = model
        self._said = list(said)
        self.id = "kept here"

    def chat(self, messages: Messages, options: Options) -> Generator[Piece, None, None]:
        """Pieces of the answer to new messages; leaving the loop undoes the turn."""
        whole = [message for turn in self._said for message in turn.messages] + list(messages)
        body = {"model": self._model, "messages": whole, "stream": True, "stream_options": {"include_usage": True}}
        text, reason, usage = "", "stop", Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        with closing(self._api.stream("/v1/chat/completions", {**body, **_body(options)})) as events:
            for event in events:
                for choice in event["choices"][:1]:
                    new = choice["delta"].get("content") or ""
                    text, reason = text + new, choice.get("finish_reason") or reason
                    yield Piece(text=new)
                usage = _usage(event["usage"]) if event.get("usage") else usage
        length = usage.prompt_tokens + usage.completion_tokens
        self._said.append(_Said(messages=(*messages, {"role": "assistant", "content": text}), length=length))
        yield Piece(finished=_end(reason, usage, SpecStats()))

    def rewind(self, *, turn: int) -> SessionState:
        """Cut the conversation back to so many turns."""
        del self._said[turn:]
        return self.state()

    def fork(self) -> "WholeSession":
        """Another conversation that goes on from here; this one stays."""
        return WholeSession(self._api, self._model, self._said)

    def state(self) -> SessionState:
        """How the conversation stands."""
        length = self._said[-1].length if self._said else 0
        return _state({"id": self.id, "length": length, "turns": len(self._said)})

    def close(self) -> None:
        """Forget it."""
        self._said.clear()


def _body(options: Options) -> dict[str, Any]:
    """Options as OpenAI's bodies have them, those alone that say something: not every server knows all."""
    usual, body = Options(), {}
    for field in fields(Options):
        name, value = field.name, getattr(options, field.name)
        if value == getattr(usual, name):
            continue
        if name in _UNSAID:
            raise RequestError(400, name, "cannot be asked of a running server in a chat")
        body[_NAMES.get(name, name)] = dict(value) if name == "logit_bias" else value
    return body


def _finished(event: dict[str, Any]) -> Finished | None:
    """How a turn ended, if this event says so."""
    if event.get("finish_reason") is None:
        return None
    if event["finish_reason"] not in ("stop", "length"):
        raise CapacityError(500, f"the turn ended there: {event['finish_reason']}")
    return _end(event["finish_reason"], _usage(event["usage"]), speculation.from_json(event["spec"]))


def _end(reason: str, usage: Usage, spec: SpecStats) -> Finished:
    return Finished(request_id="", reason=reason, usage=usage, max_new_tokens=0, spec=spec)


def _usage(usage: dict[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage["completion_tokens"],
    )


def _state(said: dict[str, Any]) -> SessionState:
    limits = said.get("limits") or {}
    ttl_s = limits.get("ttl_s")
    return SessionState(
        session_id=said["id"],
        length=said["length"],
        resident=said.get("resident", 0),
        turns=said["turns"],
        state=said.get("state", "idle"),
        idle_ms=int(said.get("idle_s", 0) * 1000),
        ttl_ms=None if ttl_s is None else int(ttl_s * 1000),
        max_tokens=limits.get("max_tokens"),
        cache_salt=said.get("salt", ""),
    )
