"""Serve on Ray: `roost serve --ray`: joins the machine's Ray cluster or starts one, deploys, and waits to be stopped.

A cluster that was there before stays, without the application; one that was started here ends. Called by the command
line.
"""

import logging
import signal
import threading
from argparse import Namespace
from contextlib import suppress

import ray
from ray import serve

from roost.cli.http_client import HttpClient
from roost.errors import RoostError, first_line
from roost.ray.build import application, plan_of
from roost.server import logs
from roost.terminal import download_bar
from roost.weights.pull import find_model

_LOOK_S = 0.1
NAME = "roost"  # of the application
_notices = logging.getLogger(logs.NOTICES)


def run(args: Namespace) -> int:
    """Deploy, and serve until told to stop."""
    plan = plan_of(args, has_address=True)
    logs.set_up(plan.config.log)
    with download_bar("fetching") as progress:
        find_model(plan.engine.model.model, progress)
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    is_joined = _join()
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # what Ray tells of each step
        address = {"host": plan.config.host, "port": plan.config.port}
        serve.start(http_options=address, logging_config={"log_level": "WARNING"})
        try:
            serve.run(application(plan), name=NAME)
        except RuntimeError as error:  # Ray has said why, above
            raise RoostError(f"Ray Serve could not deploy it: {first_line(error)}") from error
        url = f"http://{plan.config.host}:{plan.config.port}"
        _wait_for_proxy(url, told)
        low, high = plan.replicas
        many = f"{low} replicas" if low == high else f"{low} to {high} replicas"
        _notices.info("%s are ready at %s", many, url)
        told.wait()
        _notices.info("stopping; running requests get up to %d s", plan.config.drain_s)
        serve.delete(NAME)
    finally:
        if not is_joined:
            serve.shutdown()
        ray.shutdown()
    return 0


def _wait_for_proxy(url: str, told: threading.Event) -> None:
    """Wait until Ray's proxy has heard of the application; it answers 404 before."""
    while not told.is_set():
        with suppress(RoostError):
            HttpClient(url).get("/ready")
            return
        told.wait(_LOOK_S)


def _join() -> bool:
    """Join the cluster that this machine, or $RAY_ADDRESS, belongs to; False if there was none, and one was started."""
    with suppress(ConnectionError):
        ray.init(address="auto", log_to_driver=True)
        return True
    ray.init(include_dashboard=False)
    return False
