"""Every replica: requests that all of them answer, and how their answers become one.

Lists are joined, metrics have a label for their replica, a command has failed if one has refused it, and the deployment
is healthy as long as one replica is. Called by the ingress.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from roost.errors import CapacityError
from roost.ray.failures import error_response
from roost.server.responses import json_response

EVERY = (
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/sessions"),
    ("POST", "/abort_request"),
    ("POST", "/flush_cache"),
)
_PROBES = ("/health", "/ready")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.*)")

Answer = tuple[str, int, bytes]  # who answers, the status and the body


def merged(path: str, answers: Sequence[Answer]) -> Response:
    """The answers of all replicas as one."""
    if not answers:
        return error_response(path, CapacityError(503, "no replica answers"))
    if path in _PROBES:
        return _probe(answers)
    refused = next((answer for answer in answers if answer[1] >= 400), None)
    if refused is not None:
        return Response(refused[2], status_code=refused[1], media_type="application/json")
    if path == "/metrics":
        text = joined_metrics({replica: body.decode() for replica, _, body in answers})
        return Response(text, media_type="text/plain; version=0.0.4")
    if path == "/v1/sessions":
        sessions = [{**each, "replica": replica} for replica, _, body in answers for each in json.loads(body)["data"]]
        return json_response({"object": "list", "data": sessions})
    return Response(answers[0][2], media_type="text/plain" if path == "/flush_cache" else "application/json")


def joined_metrics(texts: dict[str, str]) -> str:
    """What Prometheus reads of several replicas: each family once, each sample with its replica."""
    families: dict[str, list[str]] = {}  # comments first, then samples
    for replica, text in texts.items():
        family: list[str] = []
        is_new = True
        for line in text.splitlines():
            if line.startswith("# HELP"):
                name = line.split(" ", 3)[2]
                is_new = name not in families
                family = families.setdefault(name, [])
            if line.startswith("#"):
                if is_new:
                    family.append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(part for part in (f'replica="{replica}"', found[2]) if part)
                family.append(f"{found[1]}{{{labels}}} {found[3]}")
    return "".join(f"{line}\n" for family in families.values() for line in family)


def _probe(answers: Sequence[Answer]) -> Response:
    """Healthy, or ready, as long as one replica is; the body says how all are."""
    bodies: dict[str, dict[str, Any]] = {replica: json.loads(body) for replica, _, body in answers}
    best = min(answers, key=lambda answer: answer[1])
    replicas = {replica: bodies[replica].get("status", "unhealthy") for replica, _, _ in sorted(answers)}
    return json_response({**bodies[best[0]], "replicas": replicas}, best[1])
