"""The servers of these tests. One worker runs the whole folder, so that there is one server with the real model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from tests.support.server_process import Server
from tests.support.tiny_folder import write_model

HERE = Path(__file__).parent
SPEC_STEPS = 3
PAGE = "https://app.example"  # of an origin that is allowed

StartTiny = Callable[..., Server]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, one of them has all of these; said before the groups are read."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("server"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the default model and the head that comes with it: whatever is asked must hold with drafts too.

    At the end it must be as it was at the beginning, and go when told to. The tiny models' servers do not speculate.
    """
    sizes = {"pool-tokens": 8192, "context": 2048, "chunk": 128, "max-running": 8, "max-queued": 64}
    patience = {"threads": 1, "health-answer-s": 120}  # other tests run beside this one
    drafts = {"spec-steps": SPEC_STEPS}
    flags = [text for name, value in (sizes | patience | drafts).items() for text in (f"--{name}", str(value))]
    started = Server(tmp_path_factory.mktemp("server"), *flags)
    try:
        yield started
        started.check_rest()
        assert started.stop() == 0
        assert started.litter() == []
    finally:
        started.kill()


@pytest.fixture
def rested(server: Server) -> Iterator[Server]:
    """The same, for a test that must leave nothing behind."""
    yield server
    server.check_rest()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start_tiny(tmp_path: Path, tiny_model: Path) -> Iterator[StartTiny]:
    """Start a server that the test may do anything to."""
    started: list[Server] = []

    def start(*flags: str, model: Path = tiny_model, wait: bool = True) -> Server:
        flags = ("--model", str(model), "--threads", "1", "--pool-tokens", "16384", *flags)
        started.append(Server(tmp_path, *flags, wait=wait))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@pytest.fixture(scope="session")
def friendly(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server with a key, another name, and a page of its own."""
    flags = ("--api-key", "friend", "--allow-host", "roost.example", "--allow-origin", PAGE)
    model = ("--model", str(tiny_model), "--threads", "1", "--pool-tokens", "8192")
    started = Server(tmp_path_factory.mktemp("friendly"), *model, *flags)
    started.http.headers["authorization"] = "Bearer friend"
    try:
        yield started
        started.check_rest()
        assert started.stop() == 0
    finally:
        started.kill()
