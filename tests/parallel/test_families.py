"""Two processes that share a model of any family say what one says, with the same log-probabilities."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from roost import LLM, Options
from tests.parallel.conftest import CONFIG
from tests.parallel.test_executor import NEAR, numbers, say, tokens
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_folder import write_tokenizer
from tests.support.tiny_models import EVEN, KINDS, OFFSET_NORMS, SHAPE, randomised

ALWAYS = ("qwen3.5-moe",)  # recurrent layers, attention and experts; the others in the full suite


def write_checkpoint(kind: str, folder: Path) -> Path:
    """Write a random checkpoint of a kind that two ranks can share."""
    architecture, config, special = KINDS[kind]
    sizes = {**SHAPE, **special}
    even = {name: size for name, size in EVEN.items() if name in sizes}
    torch.manual_seed(7)
    made = architecture(config(**{**sizes, **even, "vocab_size": byte_level().vocab_size}))
    randomised(made, least_norm=-0.5 if kind.startswith(OFFSET_NORMS) else 0.5).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "kind", [kind if kind in ALWAYS else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]
)
def test_two_processes_say_what_one_says(kind: str, tmp_path: Path) -> None:
    folder = str(write_checkpoint(kind, tmp_path))
    two_config = replace(CONFIG, model=replace(CONFIG.model, tp=2))
    with LLM(folder, CONFIG) as one, LLM(folder, two_config) as two:
        scored = Options(max_new_tokens=24, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs_from=0)
        alone, shared = say(one, scored), say(two, scored)
        assert tokens(shared) == tokens(alone)
        np.testing.assert_allclose(numbers(shared), numbers(alone), atol=NEAR)
