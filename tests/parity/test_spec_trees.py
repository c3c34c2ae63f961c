"""Trees whose accepted path is not their first: KV, positions, masks and hidden states must follow the path.

A drafter that is always right puts its path in front, where it hides all of these. Here a decoy is a little better at
some positions; the right path is in every tree, behind it.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.drafters.eagle import EagleDrafter
from roost.messages import SpecStats
from roost.sched import planner
from roost.sched.request import LaunchedStep
from roost.sched.state import State
from roost.spec_shape import DraftKv, SpecShape
from roost.step import StepId
from tests.support.forced_drafts import NGRAM, Knowing, assert_every_page_is_back, model_of, plainly, told
from tests.support.random_heads import make_head
from tests.support.tiny_models import DEVICE, Served, configure, prompts

BUSHY = SpecShape(steps=4, topk=4, tokens=21, draft_kv=DraftKv.PAIR)
KINDS = pytest.mark.parametrize(("kind", "name"), [("llama", "eagle"), ("llama", "eagle3"), ("qwen2-window", "eagle")])
NUM_NEW = 21  # one, and four rounds of five
(PROMPT,) = prompts(10, seed=6)


def served_with_decoys(kind: str, name: str, kv_cache_dtype: str = "auto") -> Served:
    """One request whose every round accepts all it can, along a path that is not the first."""
    text = PROMPT + plainly(kind, PROMPT, NUM_NEW + 6, kv_cache_dtype)
    # never the last of a round, nor two in one: the right path is the second or third best
    head = Knowing(make_head(name, model_of(kind)), text, decoy_after=(10, 15, 21, 26))
    head.aux_layers = make_head(name, model_of(kind)).aux_layers
    config = configure(spec=BUSHY, page_size=4, kv_cache_dtype=kv_cache_dtype)
    served = Served(model_of(kind), config, head=head)
    served.submit("r", PROMPT, NUM_NEW)
    served.run()
    return served


def draft_kv(served: Served, num_positions: int) -> Tensor:
    """Draft KV of the first positions of the only row there was."""
    drafter = served.executor.runner.passes.drafter
    assert isinstance(drafter, EagleDrafter)
    cache, at = drafter.kv_cache, torch.arange(num_positions, device=DEVICE)
    (row,) = cache.table.pages.any(dim=1).nonzero().flatten().tolist()
    slots = cache.table.slots(torch.full_like(at, row), at)
    return torch.cat([cache.keys[:, slots], cache.values[:, slots]], dim=-1)


@KINDS
def test_a_path_that_is_not_the_first_is_accepted_with_its_kv_in_every_pool(kind: str, name: str) -> None:
    served = served_with_decoys(kind, name)
    assert served.output("r") == plainly(kind, PROMPT, NUM_NEW)
    assert served.finish("r").spec == SpecStats(
        rounds=4, drafts_offered=80, drafts_accepted=16, histogram=(0, 0, 0, 0, 4)
    )
    assert_every_page_is_back(served)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "qwen2-window"])
def test_the_scales_of_quantised_kv_follow_an_accepted_path(kind: str, kv_cache_dtype: str) -> None:
    served = served_with_decoys(kind, "eagle", kv_cache_dtype)
    assert served.output("r") == plainly(kind, PROMPT, NUM_NEW, kv_cache_dtype)
    assert served.finish("r").spec.histogram == (0, 0, 0, 0, 4)
    assert_every_page_is_back(served)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_draft_kv_after_rounds_is_that_of_the_text(name: str) -> None:
    served = served_with_decoys("llama", name)
    text = PROMPT + served.output("r")
    whole = Served(model_of("llama"), configure(spec=BUSHY, depth=0), head=make_head(name, model_of("llama")))
    whole.submit("r", text, 1)
    whole.run()
    settled = len(text) - 1  # the last token has no slot yet
    torch.testing.assert_close(draft_kv(served, settled), draft_kv(whole, settled), rtol=1e-3, atol=1e-4)


def test_a_round_narrower_than_its_tree_accepts_no_node_it_did_not_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is planned so; the plan could say it."""
    work = [PROMPT, PROMPT[::-1]]
    outputs = [plainly("llama", prompt, 16) for prompt in work]

    build_step = planner._build_step

    def narrower(state: State, step: StepId, chosen: planner.Chosen) -> LaunchedStep:
        launched = build_step(state, step, chosen)
        plan, is_first = launched.plan, np.array([request.id == "0" for request in launched.requests])
        query_lens = np.where(~plan.is_prefill & is_first, 3, plan.query_lens).astype(np.int32)
        return replace(launched, plan=replace(plan, query_lens=query_lens))

    monkeypatch.setattr(planner, "_build_step", narrower)
    served = told("llama", configure(spec=NGRAM), [a + b for a, b in zip(work, outputs, strict=True)])
    for number, prompt in enumerate(work):
        served.submit(str(number), prompt, 13)
    served.run()
    for number, output in enumerate(outputs):
        assert served.output(str(number)) == output[:13]
        assert served.finish(str(number)).spec.histogram == ((0, 0, 4, 0), (0, 0, 0, 3))[number]
