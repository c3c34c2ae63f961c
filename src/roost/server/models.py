"""Models: the names of the one model that is served, and what clients can ask about it.

Owns the values that `model` may have; `default` always works. Has the fields that vLLM's and SGLang's clients look for,
by their names, as far as they are known here. Called by the app's routes and by every endpoint that takes `model`.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.server.responses import json_response
from roost.server.state import ServerState
from roost.server.wire_format import Started


async def models(request: Request) -> Response:
    """GET /v1/models."""
    server: ServerState = request.app.state.server
    server.check_ready()
    return json_response({"object": "list", "data": [_card(server)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    server: ServerState = request.app.state.server
    check_model(server, request.path_params["model"])
    return json_response(_card(server))


async def model_info(request: Request) -> Response:
    """GET /get_model_info and /model_info."""
    server: ServerState = request.app.state.server
    server.check_ready()
    name = started(server).model_name
    info = {
        "model_path": name,
        "tokenizer_path": name,
        "served_model_name": server.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_model_len": started(server).context,
        "vocab_size": started(server).vocab_size,
        "has_chat_template": server.language.template is not None,
    }
    return json_response(info)


def check_model(server: ServerState, name: str | None) -> None:
    """Refuse (404) the name of a model that is not served; null is fine."""
    server.check_ready()
    known = server.config.served_model_name or (server.model_name,)
    if name is not None and name not in ("default", *known):
        raise RequestError(404, "model", f"there is no model {name[:100]!r}; this server has {server.model_name!r}")


def started(server: ServerState) -> Started:
    """What the engine said when it was ready, which it is."""
    assert server.engine.started is not None
    return server.engine.started


def _card(server: ServerState) -> dict[str, Any]:
    """The model in OpenAI's form, with `max_model_len` as in vLLM and SGLang."""
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.started_at,
        "owned_by": "roost",
        "root": started(server).model_name,
        "parent": None,
        "max_model_len": started(server).context,
    }
