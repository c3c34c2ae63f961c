"""A model that several ranks share is the model: the logits and the output of one, the same bits on every rank."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.group import ALONE, Group
from roost.models.decoder import Decoder
from roost.models.shards import check_shards
from tests.support.thread_group import on_ranks
from tests.support.tiny_models import DEVICE, KINDS, ops, prompts, tiny
from tests.support.workload import logits_in_one_pass

(PROMPT,) = prompts(40, seed=10)  # past the window
FEW = ("llama", "tied", "gpt-oss", "qwen3.5-moe", "lfm2-biased", "gemma4", "gemma4-moe")  # what families differ in


def model_of(kind: str, group: Group = ALONE, weights: str = "fp32") -> Decoder:
    """One rank's."""
    checkpoint = tiny(kind, is_even=True)
    return Decoder(checkpoint.config, checkpoint.reference.state_dict(), weights, DEVICE, replace(ops(), group=group))


def assert_equal_on_ranks(found: list[Tensor], expected: Tensor) -> None:
    """The same bits on every rank, and what one process computes but for the order of sums."""
    assert all(torch.equal(each, found[0]) for each in found)
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[0].argmax(dim=-1), expected.argmax(dim=-1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_give_the_logits_of_one_process(size: int, kind: str) -> None:
    expected = logits_in_one_pass(model_of(kind), PROMPT)
    found = on_ranks(size, lambda group: logits_in_one_pass(model_of(kind, group), PROMPT))
    assert_equal_on_ranks(found, expected)


@pytest.mark.parametrize("kind", FEW)
def test_four_ranks_give_the_logits_of_one_process(kind: str) -> None:
    test_ranks_give_the_logits_of_one_process(4, kind)


@pytest.mark.parametrize("kind", FEW)
def test_ranks_have_equal_parts_of_what_is_large(kind: str) -> None:
    alone = model_of(kind)
    first, second = on_ranks(2, lambda group: model_of(kind, group))
    assert first.traits == alone.traits and first.hidden_size == alone.hidden_size
    assert first.kv == second.kv and first.activation_width == second.activation_width < alone.activation_width
    for whole, part in zip(alone.kv, first.kv, strict=True):
        assert whole.token_bytes == 2 * part.token_bytes


def test_what_cannot_be_split_is_refused_with_what_can() -> None:
    def said(kind: str, size: int) -> str:
        with pytest.raises(ConfigError) as refused:
            check_shards(tiny(kind).config, size)
        return str(refused.value)

    assert said("llama", 4) == "--tp 4: 6 heads cannot be split evenly; for this model --tp may be 1 or 2"
    assert said("gemma4", 2) == "--tp 2: 3 KV heads cannot be split evenly; for this model --tp may be 1"
    assert said("qwen3.5-moe", 2).startswith("--tp 2: 3 heads of a gated delta rule cannot")
    assert said("gpt-oss", 5).startswith("--tp 5: 6 heads cannot")
    check_shards(tiny("gemma4").config, 1)
    check_shards(object(), 1)
    with pytest.raises(ConfigError, match="--tp 2: models of this family run on one rank, --tp must be 1"):
        check_shards(object(), 2)
