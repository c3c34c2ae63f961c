"""Health: whether the engine works, what it was told, and what it counts.

Healthy means that the engine answers and, while there is work, has completed a step lately. A server whose engine hangs
answers 503. Called by the app's routes.
"""

import asyncio
from contextlib import aclosing
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

import roost
from roost.errors import CapacityError, RequestError
from roost.front.answer import checked
from roost.front.options import Options, submits
from roost.front.speculation import as_json
from roost.messages import GetStats, Stats
from roost.sched.intake import PRIORITY_MAX
from roost.server.generation import while_connected
from roost.server.keys import caller, check_admin
from roost.server.models import started
from roost.server.responses import json_response
from roost.server.state import ServerState

_SGLANGS_NAMES = {
    "max_running_requests": "max_running",
    "max_queued_requests": "max_queued",
    "chunked_prefill_size": "chunk",
    "page_size": "page_size",
    "device": "device",
    "attention_backend": "backend",
    "speculative_num_steps": "spec_steps",
    "speculative_eagle_topk": "spec_topk",
    "speculative_num_draft_tokens": "spec_tokens",
}


async def health(request: Request) -> Response:
    """GET /health."""
    server: ServerState = request.app.state.server
    server.check_alive()
    stats = await _stats(server)
    if stats.step_age_ms > server.config.health_step_s * 1000:
        raise CapacityError(503, f"there is work, but no step was completed for {stats.step_age_ms // 1000} s")
    return json_response({"status": "ok"})


async def health_generate(request: Request) -> Response:
    """GET /health_generate: healthy if a token is generated, ahead of everything that waits."""
    server: ServerState = request.app.state.server
    server.check_ready()
    try:
        await while_connected(request, asyncio.shield(_probe(server)))
    except RequestError as error:
        raise CapacityError(503, f"no token was generated: {error.reason}") from error
    except CapacityError as error:
        if error.status != 429:
            raise
        return await health(request)  # the queue is full: that others' steps complete must do
    return json_response({"status": "ok"})


def _probe(server: ServerState) -> "asyncio.Task[None]":
    """The task that generates one token for all who ask meanwhile: together they cost no more than one."""
    if server.probe is None or server.probe.done():
        server.probe = asyncio.create_task(_generate_one(server))
        server.probe.add_done_callback(lambda task: task.cancelled() or task.exception())  # who asked may have left
    return server.probe


async def _generate_one(server: ServerState) -> None:
    """Generate a token; its times are not measured, as it is no client's."""
    options = Options(max_new_tokens=1, temperature=0, priority=PRIORITY_MAX, timeout_s=server.config.health_step_s)
    (submit,) = submits(server.engine.new_id(), (0,), options, server.language.tokenizer)
    async with aclosing(server.engine.stream_events(submit, f"health-{uuid4().hex}")) as events:
        async for event in events:
            checked(event)


async def version(request: Request) -> Response:
    """GET /version."""
    return json_response({"version": roost.__version__})


async def ready(request: Request) -> Response:
    """GET /ready."""
    server: ServerState = request.app.state.server
    server.check_ready()
    return json_response({"status": "ready", "model": server.model_name})


async def server_info(request: Request) -> Response:
    """GET /server_info and /get_server_info."""
    server: ServerState = request.app.state.server
    server.check_alive()
    own = started(server)
    info: dict[str, Any] = {
        "version": roost.__version__,
        "model": own.model_name,
        "settings": own.settings,
        "load_s": round(own.load_s, 3),
        **_as_sglang(server),
    }
    if caller(request).is_admin:  # the numbers are all clients' together
        stats = await _stats(server)
        average = {"avg_spec_accept_length": stats.spec.accept_length} if stats.spec.drafts_offered else {}
        info["stats"] = {**asdict(stats), "spec": as_json(stats.spec)}
        info["internal_states"] = [{"num_running_reqs": stats.running, "num_queue_reqs": stats.queued, **average}]
    return json_response(info)


def _as_sglang(server: ServerState) -> dict[str, Any]:
    """What SGLang's clients look for, under SGLang's names."""
    own = started(server)
    return {
        "status": "ready",
        "model_path": own.model_name,
        "served_model_name": server.model_name,
        "context_length": own.context,
        "max_req_input_len": own.context - 1,
        **{theirs: own.settings[ours] for theirs, ours in _SGLANGS_NAMES.items() if ours in own.settings},
        "speculative_algorithm": None if own.settings.get("spec") == "none" else own.settings.get("spec"),
    }


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    server: ServerState = request.app.state.server
    check_admin(request)
    server.check_alive()
    text = server.metrics.exposition(await _stats(server), server.engine.queued_max)
    return Response(text, media_type="text/plain; version=0.0.4")


async def _stats(server: ServerState) -> Stats:
    server.close_expired()
    answer = await server.ask(GetStats())
    if not isinstance(answer, Stats):
        raise CapacityError(503, "the engine is not running")
    return answer
