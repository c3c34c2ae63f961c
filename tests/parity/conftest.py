"""Settings of the parity tests, and the default model, which is loaded once for all of them."""

from collections.abc import Iterator

import pytest
import torch

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SpecConfig

torch.set_num_threads(1)  # tiny tensors: more threads only cost


def default_config(weights: str) -> EngineConfig:
    """For the default model: a small pool, one thread, no drafts."""
    return EngineConfig(
        model=ModelConfig(weights=weights, threads=1),
        memory=MemoryConfig(pool_tokens=2048),
        sched=SchedConfig(context=1024),
        spec=SpecConfig(spec="none"),
    )


@pytest.fixture(scope="session")
def exact() -> Iterator[LLM]:
    """The default model in fp32."""
    with LLM("default", default_config("fp32")) as llm:
        yield llm
