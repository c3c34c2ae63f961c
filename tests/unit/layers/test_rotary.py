"""YaRN slows the same frequencies down as transformers, and makes queries and keys as long."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from roost.layers.rotary import frequencies
from roost.models.registry import decoder_config
from tests.support.config_files import LLAMA

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"truncate": False},
        {"beta_fast": 6.0, "beta_slow": 0.3, "truncate": False},
        {"beta_fast": 2.0, "beta_slow": 2.0},
        {"attention_factor": 0.75},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7},
        {"factor": 1.0},
        {"original_max_position_embeddings": 5, "rope_theta": 90.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_yarn_is_what_transformers_makes_of_it(head_dim: int, more: dict[str, float]) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        **more,
    }
    theirs = Qwen3Config(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
    expected, length = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    config = decoder_config({**LLAMA, "head_dim": head_dim, "rope_theta": None, "rope_parameters": rope})
    (kind, *_) = config.layers
    torch.testing.assert_close(frequencies(kind.rope, head_dim, CPU), expected, atol=0.0, rtol=1e-6)
    assert kind.rope.length == pytest.approx(length)
    assert config.heads_of(kind).scale == pytest.approx(head_dim**-0.5 * length**2)
