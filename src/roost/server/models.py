"""Models: the names of the one model that is served, and what clients can ask about it.

Owns the values that `model` may have; `default` always works. Has the fields that vLLM's and SGLang's clients look for,
by their names, as far as they are known here. Called by the app's routes and by every endpoint that takes `model`.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.server.context import Desk, json_response
from roost.server.wire import Started


async def models(request: Request) -> Response:
    """GET /v1/models."""
    desk: Desk = request.app.state.desk
    desk.check_ready()
    return json_response({"object": "list", "data": [_card(desk)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{model}."""
    desk: Desk = request.app.state.desk
    check_model(desk, request.path_params["model"])
    return json_response(_card(desk))


async def model_info(request: Request) -> Response:
    """GET /get_model_info and /model_info."""
    desk: Desk = request.app.state.desk
    desk.check_ready()
    name = started(desk).model_name
    info = {
        "model_path": name,
        "tokenizer_path": name,
        "served_model_name": desk.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_model_len": started(desk).context,
        "vocab_size": started(desk).vocab_size,
        "has_chat_template": desk.language.template is not None,
    }
    return json_response(info)


def check_model(desk: Desk, name: str | None) -> None:
    """Refuse (404) the name of a model that is not served; null is fine."""
    desk.check_ready()
    known = desk.config.served_model_name or (desk.model_name,)
    if name is not None and name not in ("default", *known):
        raise RequestError(404, "model", f"there is no model {name[:100]!r}; this server has {desk.model_name!r}")


def started(desk: Desk) -> Started:
    """What the engine said when it was ready, which it is."""
    assert desk.engine.started is not None
    return desk.engine.started


def _card(desk: Desk) -> dict[str, Any]:
    """The model in OpenAI's form, with `max_model_len` as in vLLM and SGLang."""
    return {
        "id": desk.model_name,
        "object": "model",
        "created": desk.began,
        "owned_by": "roost",
        "root": started(desk).model_name,
        "parent": None,
        "max_model_len": started(desk).context,
    }
