"""A tiny model in a folder, and engines of it with one rank or two."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, SchedConfig
from roost.parallel import ranks
from roost.runner.runner import Runner
from tests.parallel.odd_follower import summing
from tests.support.tiny_folder import write_model

Start = Callable[..., LLM]
CONFIG = EngineConfig(
    model=ModelConfig(weights="fp32", threads=1, backend="torch"),
    memory=MemoryConfig(page_size=4, pool_tokens=8192, strict_memory=2),
    sched=SchedConfig(max_running=8, chunk=64),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Start an engine, of two ranks unless told; it is ended after the test."""
    started: list[LLM] = []

    def begin(config: EngineConfig = CONFIG, tp: int = 2) -> LLM:
        started.append(LLM(str(folder), replace(config, model=replace(config.model, tp=tp))))
        return started[-1]

    yield begin
    for llm in started:
        llm.close()


def odd(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Have followers be odd, in steps that wait for all ranks."""
    monkeypatch.setattr(ranks, "FOLLOWER", (sys.executable, "-m", "tests.parallel.odd_follower", kind))
    monkeypatch.setattr(Runner, "run", summing)
