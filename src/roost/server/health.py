"""Health: whether the engine works, what it was told, and what it counts.

Healthy means that the engine answers, and that while there is work a step was completed lately. A server that is up
but whose engine hangs says 503. Called by the app's routes.
"""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import roost
from roost.errors import CapacityError
from roost.front.speculation import as_json
from roost.messages import GetStats, Stats
from roost.server.desk import Desk, json_response
from roost.server.keys import caller, check_admin


async def health(request: Request) -> Response:
    """GET /health."""
    desk: Desk = request.app.state.desk
    desk.check_alive()
    stats = await _stats(desk)
    if stats.step_age_ms > desk.config.health_step_s * 1000:
        raise CapacityError(503, f"there is work, but no step was completed for {stats.step_age_ms // 1000} s")
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """GET /ready."""
    desk: Desk = request.app.state.desk
    desk.check_ready()
    return json_response({"status": "ready", "model": desk.model_name})


async def server_info(request: Request) -> Response:
    """GET /server_info."""
    desk: Desk = request.app.state.desk
    desk.check_alive()
    started = desk.link.started
    assert started is not None
    info: dict[str, Any] = {
        "version": roost.__version__,
        "model": started.model_name,
        "settings": started.settings,
        "load_s": round(started.load_s, 3),
    }
    if caller(request).is_admin:  # the numbers are all clients' together
        stats = await _stats(desk)
        info["stats"] = {**asdict(stats), "spec": as_json(stats.spec)}
    return json_response(info)


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    desk: Desk = request.app.state.desk
    check_admin(request)
    desk.check_alive()
    return Response(desk.metrics.exposition(await _stats(desk)), media_type="text/plain; version=0.0.4")


async def _stats(desk: Desk) -> Stats:
    desk.close_overdue()
    answer = await desk.ask(GetStats())
    if not isinstance(answer, Stats):
        raise CapacityError(503, "the engine is not running")
    return answer
