"""A model that several ranks share is the model: the logits and the output of one, the same bits on every rank."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roost.errors import ConfigError
from roost.layers.group import ALONE, Group
from roost.layers.ops import Ops
from roost.models.decoder import Decoder
from roost.models.model import PairHead
from roost.models.shards import check_shards
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.weights.draft import check_head, load_head
from tests.support.mtp_heads import make_mtp
from tests.support.random_heads import make_head, write_eagle, write_eagle3
from tests.support.thread_group import ThreadRank, on_ranks
from tests.support.tiny_models import DEVICE, KINDS, VOCAB, Served, configure, ops, prompts, tiny
from tests.support.workload import dense, logits_in_one_pass, several

(PROMPT,) = prompts(40, seed=10)  # past the window
FEW = ("llama", "tied", "gpt-oss", "qwen3.5-moe", "lfm2-biased", "gemma4", "gemma4-moe")  # what families differ in


def model_of(kind: str, group: Group = ALONE, weights: str = "fp32") -> Decoder:
    """One rank's."""
    checkpoint = tiny(kind, is_even=True)
    return Decoder(checkpoint.config, checkpoint.reference.state_dict(), weights, DEVICE, grouped(group))


def grouped(group: Group) -> Ops:
    """The operations of a rank."""
    return replace(ops(), group=group)


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


def test_there_is_one_sum_behind_attention_and_one_behind_the_feed_forward() -> None:
    def collectives(group: Group) -> int:
        logits_in_one_pass(model_of("llama", group), PROMPT)
        assert isinstance(group, ThreadRank)
        return group.num_collectives

    model_of("llama")
    assert on_ranks(2, collectives) == [1 + 2 * 3 + 1] * 2  # with the embedding and the logits


HEADS = {
    "eagle": ("eagle", write_eagle),
    "eagle, target's embedding": ("eagle", partial(write_eagle, own_embed=False, fc_bias=False)),
    "eagle3": ("eagle3", write_eagle3),
    "eagle3, all its own": ("eagle3", partial(write_eagle3, num_tokens=VOCAB, own_embed=True, fc_bias=True)),
    "eagle3, target's head": ("eagle3", partial(write_eagle3, num_tokens=VOCAB, own_head=False)),
}


def drafted(head: PairHead, model: Decoder) -> Tensor:
    """Logits of a head over a prompt, and behind one step of its own."""
    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT))
    last, aux_hidden = model.forward_with_aux(tokens, positions, dense(model), head.aux_layers)
    hidden = head.fuse(last, aux_hidden)
    once = head.forward(tokens, hidden, positions, dense(head))
    return torch.cat([head.logits(once), head.logits(head.forward(tokens, once, positions, dense(head)))])


@pytest.mark.parametrize("name", HEADS)
def test_draft_heads_give_the_logits_of_one_process(name: str, tmp_path: Path) -> None:
    kind, write = HEADS[name]
    write(tmp_path)

    def run(group: Group) -> Tensor:
        model = model_of("llama", group)
        head = load_head(tmp_path, kind, model, layer_ids=None, weights="fp32", device=DEVICE)
        assert isinstance(head, PairHead)
        assert head.kv[0].num_kv_heads == 2 // group.size
        return drafted(head, model)

    expected = run(ALONE)
    assert_equal_on_ranks(on_ranks(2, run), expected)


def test_an_mtp_head_gives_the_logits_of_one_process() -> None:
    def run(group: Group) -> Tensor:
        model = Decoder(checkpoint.config, checkpoint.reference.state_dict(), "fp32", DEVICE, grouped(group))
        head = make_mtp("qwen3.5", model)
        assert isinstance(head, PairHead)
        return drafted(head, model)

    checkpoint = tiny("qwen3.5")
    expected = run(ALONE)
    assert_equal_on_ranks(on_ranks(2, run), expected)


def test_draft_heads_that_cannot_be_split_are_refused_by_name(tmp_path: Path) -> None:
    write_eagle3(tmp_path)
    check = partial(check_head, tmp_path, "eagle3", tiny("llama").config, layer_ids=None, topk=1)
    check(ranks=2)
    with pytest.raises(ConfigError, match=r"^--draft .*: --tp 3: 4 heads cannot be split evenly; .* 1, 2 or 4$"):
        check(ranks=3)


@pytest.mark.parametrize("kind", ["llama", "qwen3.5", "gpt-oss"])
@pytest.mark.parametrize("head", [None, "eagle3"])
def test_engines_that_run_the_same_steps_generate_what_one_does(kind: str, head: str | None) -> None:
    work = several(seed=2)
    spec = PLAIN if head is None else SpecShape(steps=3, topk=2, tokens=6, draft_kv=DraftKv.PAIR)

    def run(group: Group) -> list[tuple[int, ...]]:
        model = model_of(kind, group)
        drafter = None if head is None else make_head(head, model)
        served = Served(model, configure(chunk=5, spec=spec), drafter)
        for number, (prompt, num_new) in enumerate(work):
            served.submit(f"r{number}", prompt, num_new)
        served.run()
        return [served.output(f"r{number}") for number in range(len(work))]

    alone = run(ALONE)
    assert on_ranks(2, run) == [alone, alone]


def test_rounded_weights_are_nearly_the_same() -> None:
    expected = logits_in_one_pass(model_of("llama", weights="int8"), PROMPT)
    found = on_ranks(2, lambda group: logits_in_one_pass(model_of("llama", group, "int8"), PROMPT))
    assert torch.equal(*found) and (found[0] - expected).norm() / expected.norm() < 0.1


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
