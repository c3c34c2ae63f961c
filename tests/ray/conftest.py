"""One Ray cluster for these tests, and a deployment of tiny replicas on it. Skipped where Ray is not installed."""

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.tiny_folder import write_model

if TYPE_CHECKING:
    from tests.ray.cluster import Cluster

HERE = Path(__file__).parent

collect_ignore_glob = [] if find_spec("ray") is not None else ["test_*.py"]
# for workers, which are neither nicer than other processes nor ask for a token
os.environ |= {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, one of them has all of these."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ray"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Cluster]":
    """Two replicas; a test that changes that puts it right again."""
    from tests.ray.cluster import Cluster  # noqa: PLC0415 - what it imports reads the environment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = Cluster(tiny_model, tmp_path_factory.mktemp("journal"), port)
    try:
        started.deploy(2)
        yield started
    finally:
        started.stop()
