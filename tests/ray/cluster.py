"""A deployment under test on a Ray cluster of its own: deploy, ask, kill parts of it, wait until it is whole again."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client  # what `serve deploy` ends in; the way there needs Ray's dashboard
from ray.serve.schema import ServeDeploySchema
from websockets.sync.client import ClientConnection

from roost.ray.build import INGRESS, REPLICA
from roost.ray.replica import REPLICA_HEADER

FILE = Path(__file__).parents[2] / "deploy" / "ray" / "roost.yaml"
PATIENCE_S = 90
NUM_CPUS = 4  # as far as Ray is concerned
STORE_BYTES = 80 * 1024 * 1024

Value = TypeVar("Value")


class Cluster:
    """Ray, Serve and a deployment."""

    def __init__(self, model: Path, journal: Path, port: int) -> None:
        self._args = {"model": str(model), "threads": 1, "pool_tokens": 16384, "drain_s": 20}
        self._journal = str(journal)
        self._port = port
        self.url = f"http://127.0.0.1:{port}"
        ray.init(num_cpus=NUM_CPUS, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def deploy(self, num: int, *, has_journal: bool = True, **deployment: Any) -> None:
        """Deploy as `serve deploy` does, and wait until so many replicas are there.

        `deployment`: what the file says of the replicas; where that alone changes, nothing else is replaced.
        """
        config = yaml.safe_load(FILE.read_text())
        (deployed,) = config["applications"]
        deployed["args"] = {**self._args, "replicas": 1, **({"journal": self._journal} if has_journal else {})}
        deployed["deployments"] = [{"name": REPLICA, **(deployment or {"num_replicas": num})}]
        del config["http_options"]  # they are those of the start
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config), _blocking=True)
        wait_until(lambda: len(self.replicas) == num)

    @property
    def replicas(self) -> list[str]:
        """The replicas that answer now."""
        try:
            answer = self.http.get("/health")
        except httpx.HTTPError:
            return []
        if answer.status_code != 200:
            return []
        return [name for name, said in answer.json()["replicas"].items() if said == "ok"]

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send JSON."""
        return self.http.post(path, json=body, headers=headers)

    def open(self, body: dict[str, Any] | None = None) -> tuple[str, str]:
        """Open a session; its id and the replica that has it."""
        answer = self.post("/v1/sessions", body or {})
        assert answer.status_code == 201, answer.text
        return answer.json()["id"], answer.headers[REPLICA_HEADER]

    def turn(self, session: str, **fields: Any) -> httpx.Response:
        """A turn of a session."""
        return self.post(f"/v1/sessions/{session}/generate", {"text": "on", "max_tokens": 4, **fields})

    def stats(self, replica: str) -> dict[str, Any]:
        """How things stand in a replica."""
        stats: dict[str, Any] = self.http.get("/server_info", headers={REPLICA_HEADER: replica}).json()["stats"]
        return stats

    def kill_replica(self, replica: str) -> None:
        """End a replica's process."""
        self._kill(f"{REPLICA}#{replica}")

    def kill_ingress(self) -> None:
        """End the ingress, and wait for another."""
        self._kill(f"#{INGRESS}#")
        wait_until(lambda: self.replicas)

    def stop(self) -> None:
        """End everything."""
        self.http.close()
        serve.shutdown()
        ray.shutdown()

    def _kill(self, part: str) -> None:
        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if part in each["name"]]
        (name,) = names
        ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)


def wait_until(check: Callable[[], Value]) -> Value:
    """What a check gives, once it gives something true."""
    ends = time.monotonic() + PATIENCE_S
    while not (value := check()):
        assert time.monotonic() < ends, f"waited in vain for {check}"
        time.sleep(0.05)
    return value


def events_of(answer: httpx.Response) -> list[Any]:
    """The events of a stream that has ended."""
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def respond(socket: ClientConnection, **fields: Any) -> dict[str, Any]:
    """The last event of a response over a WebSocket."""
    socket.send(json.dumps({"type": "response.create", "model": "default", "max_output_tokens": 4, **fields}))
    while True:
        event: dict[str, Any] = json.loads(socket.recv())
        if event["type"] in ("response.completed", "response.incomplete", "response.failed", "error"):
            return event
