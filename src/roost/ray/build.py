"""Build: the application that Ray Serve runs: replicas of the engine, and the ingress in front of them.

Owns what a replica takes of a cluster, and refuses one that does not have it. `app` is what `serve run roost.ray:app`
and a file of `serve deploy` name; its arguments are options of `roost serve`, by their names. Called through Ray, and
by `roost serve --ray`.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from roost.cli.config_file import completed, namespace_of
from roost.cli.flag_parser import engine_of, group_of
from roost.config.options import EngineConfig
from roost.errors import ConfigError
from roost.ray.ingress import Ingress
from roost.ray.replica import EngineReplica
from roost.server.config import ServerConfig, check_server, served_names
from roost.server.keys import read_keys

REPLICA, INGRESS = "replica", "ingress"  # the deployments' names, as files of `serve deploy` have them
REPLICAS_MAX = 1024
OWN = ("replicas", "cluster_grows")  # arguments that are no options of a single server
_NAMESPACE = "serve"  # of Ray Serve
_ROUTER = "roost.ray.request_router.SessionRouter"
_PROXY = "its proxy has the connections"
_OF_CONNECTIONS = ("header_s", "body_s", "keep_alive_s", "stall_s", "max_connections", "max_connections_per_address")
_DONE_BY_RAY = dict.fromkeys(_OF_CONNECTIONS, _PROXY) | {
    "engine_restarts": "a replica ends with its engine, and Ray starts another"
}
_LOGGING = {"enable_access_log": False, "log_level": "WARNING"}  # the replicas log requests, as --log-requests says
_SOCKETS = 1024  # WebSockets of a replica, which count as requests as long as they are open
_INGRESS_REQUESTS = 2**16  # what is too much, the engines say
_REPORT_S = 2.0  # time between reports of what a replica holds
_HEALTH_S = 2.0  # time between checks of a replica
_HEALTH_ANSWER_S = 30.0  # and for its answer
_LAST_WORDS_S = 15  # for the engine to stop after the last request
_STARTS_MAX = 2  # of a replica that fails before it is ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What is deployed."""

    engine: EngineConfig
    config: ServerConfig
    replicas: tuple[int, int] = (1, 1)  # the least and the most
    cluster_grows: bool = False  # whether nodes are added when they are asked for


def plan_of(args: Namespace, *, has_address: bool) -> ReplicaPlan:
    """A plan from parsed flags; refuses what has no meaning there. `has_address`: host and port are ours to choose."""
    refused = _DONE_BY_RAY | ({} if has_address else dict.fromkeys(("host", "port"), _PROXY))
    for name, reason in refused.items():
        if vars(args)[name] is not None:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no effect on Ray Serve: {reason} (docs/CLUSTER.md)")
    config = group_of(args, ServerConfig)
    if config.port == 0:
        raise ConfigError("--port must be given a number with --ray: the proxies of all nodes listen on the same one")
    config = replace(config, served_model_name=served_names(config.served_model_name))
    if not has_address:
        config = replace(config, host="")  # any address is a name of it
    check_server(config)
    read_keys(config)
    replicas = replicas_of(str(1 if args.replicas is None else args.replicas))
    grows = args.cluster_grows is True
    return ReplicaPlan(engine=engine_of(args), config=config, replicas=replicas, cluster_grows=grows)


def replicas_of(given: str) -> tuple[int, int]:
    """The least and the most replicas of `N` or `MIN:MAX`."""
    parts = given.split(":")
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) <= 4]
    if len(numbers) != len(parts) or len(parts) > 2 or not 1 <= numbers[0] <= numbers[-1] <= REPLICAS_MAX:
        raise ConfigError(f"--replicas must be N or MIN:MAX, in 1 to {REPLICAS_MAX}, got {given[:100]!r}")
    return numbers[0], numbers[-1]


def app(args: Mapping[str, Any]) -> Application:
    """The application that `serve run roost.ray:app` and `serve deploy` ask for, by its arguments."""
    own = {name: args[name] for name in OWN if name in args}
    options = {name: value for name, value in args.items() if name not in own}
    config_file = options.pop("config", None)
    grows = str(own.get("cluster_grows", "false")).lower()
    if grows not in ("true", "false"):
        raise ConfigError(f"cluster_grows must be true or false, got {grows[:100]!r}")
    values = vars(namespace_of(options)) | {"config": config_file, "replicas": own.get("replicas")}
    plan = plan_of(completed(Namespace(**values, cluster_grows=grows == "true")), has_address=False)
    if not ray.is_initialized():  # `serve run` asks for the application before it joins the cluster
        ray.init(namespace=_NAMESPACE)
    return application(plan)


def application(plan: ReplicaPlan) -> Application:
    """A plan as an application; refuses a cluster that is too small for it."""
    engine, on_gpu = plan.engine, _on_gpu(plan.engine)
    if engine.model.threads is None and not on_gpu:
        engine = replace(engine, model=replace(engine.model, threads=1))
    need = resources_of(engine, on_gpu=on_gpu)
    if not plan.cluster_grows:
        check_cluster([node["Resources"] for node in ray.nodes() if node["Alive"]], need, plan.replicas[0])
    replicas = serve.deployment(
        EngineReplica,
        name=REPLICA,
        ray_actor_options={"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0)},
        max_ongoing_requests=engine.sched.max_running + engine.sched.max_queued + _SOCKETS,
        graceful_shutdown_timeout_s=plan.config.drain_s + _LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=1,
        logging_config=_LOGGING,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_ANSWER_S,
        max_constructor_retry_count=_STARTS_MAX,
        request_router_config={"request_router_class": _ROUTER, "request_routing_stats_period_s": _REPORT_S},
        **_how_many(plan),
        **_packed(engine, need),
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_INGRESS_REQUESTS,
        logging_config=_LOGGING,
        graceful_shutdown_timeout_s=plan.config.drain_s,
    )
    has_journal = engine.session.journal is not None
    bound: Application = ingress.bind(replicas.bind(engine, plan.config), plan.config, has_journal)
    return bound


def resources_of(engine: EngineConfig, *, on_gpu: bool) -> dict[str, float]:
    """What one replica takes, all of it on one node."""
    ranks = engine.model.tp
    return {"CPU": ranks, "GPU": ranks} if on_gpu else {"CPU": ranks * (engine.model.threads or 1)}


def check_cluster(nodes: list[dict[str, float]], need: dict[str, float], num_replicas: int) -> None:
    """Refuse a cluster whose nodes do not have room for all replicas."""
    room = sum(min(int(node.get(kind, 0) // amount) for kind, amount in need.items()) for node in nodes)
    if room < num_replicas:
        has = "; ".join(_shown({kind: node.get(kind, 0) for kind in need}) for node in nodes) or "none"
        raise ConfigError(
            f"the Ray cluster is too small: {num_replicas} replicas need {_shown(need)} each, on one node, and there "
            f"is room for {room} (nodes: {has}); fewer --replicas, or --cluster-grows where nodes will be added"
        )


def _shown(resources: dict[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def _how_many(plan: ReplicaPlan) -> dict[str, Any]:
    low, high = plan.replicas
    if low == high:
        return {"num_replicas": low}
    target = plan.engine.sched.max_running
    return {"autoscaling_config": {"min_replicas": low, "max_replicas": high, "target_ongoing_requests": target}}


def _packed(engine: EngineConfig, need: dict[str, float]) -> dict[str, Any]:
    """The placement group of a replica with several ranks: one bundle, since they are processes of one machine."""
    if engine.model.tp == 1:
        return {}
    return {"placement_group_bundles": [need], "placement_group_strategy": "STRICT_PACK"}


def _on_gpu(engine: EngineConfig) -> bool:
    device = engine.model.device
    return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
