"""Work for an engine, and what transformers makes of it. Used by the tests of this folder."""

from collections.abc import Sequence

import pytest

from roost.config import EngineConfig
from roost.models.decoder import Decoder
from tests.parity.tiny import Served, greedy, prompts

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
CHUNKS = pytest.mark.parametrize("chunk", [5, 512])

Work = Sequence[tuple[tuple[int, ...], int]]  # prompts and how many tokens each shall get


def several(seed: int = 0) -> Work:
    """Requests of different lengths."""
    return list(zip(prompts(1, 33, 7, 18, 16, seed=seed), (25, 14, 30, 1, 17), strict=True))


def serve(model: Decoder, config: EngineConfig, work: Work) -> Served:
    """Run requests side by side."""
    served = Served(model, config)
    for number, (prompt, num_new) in enumerate(work):
        served.submit(f"r{number}", prompt, num_new)
    served.run()
    return served


def assert_equals_reference(served: Served, kind: str, work: Work) -> None:
    """Every output is what transformers generates."""
    for number, (prompt, num_new) in enumerate(work):
        assert served.output(f"r{number}") == greedy(kind, prompt, num_new), number
        assert served.finish(f"r{number}").reason == "length"
