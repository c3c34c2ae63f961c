"""Configurations that have broken engines of this kind, by name: never left to a draw of options.

Each returns what plain decoding returns and gives every page back; with rows that are not widened, each is refused by
the guard with its numbers. Pools start as NaN, and every tick is audited.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from roost.config.options import EngineConfig
from roost.config.resolved import Resolved
from roost.errors import InvariantError
from roost.kv.pages import ceil_to
from roost.models.decoder import Decoder
from roost.models.model import Head
from roost.spec_shape import DraftKv, SpecShape
from tests.support.forced_drafts import assert_every_page_is_back, model_of
from tests.support.random_heads import make_head
from tests.support.tiny_models import SHAPE, Served, Tiny, configure, prompts
from tests.support.workload import Work

EIGHT = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)
CONTEXT = 512  # whole pages of any size here: rows that are not widened have no room to spare
LLAMA_2 = {
    "num_key_value_heads": SHAPE["num_attention_heads"],  # every head has keys of its own
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

# name -> head, page size, depth, prompts and how many tokens each shall get: the last fills its context
NAMED: dict[str, tuple[str, int, int, Work]] = {
    "eagle3, page 64, K 8, depth 1": ("eagle3", 64, 1, [(p, 20) for p in prompts(63, 64, 5, 492, seed=1)]),
    "Llama 2, page 4, K 8, depth 0": ("eagle", 4, 0, [(p, 20) for p in prompts(3, 4, 18, 492, seed=2)]),
    "page 256, K 8, to the context's end": (
        "eagle",
        256,
        1,
        [(p, min(44, CONTEXT - len(p))) for p in prompts(256, 511, 493)],
    ),
}
EACH = pytest.mark.parametrize("name", NAMED)


@cache
def _target(name: str) -> Decoder:
    if not name.startswith("Llama 2"):
        return model_of("llama")
    torch.manual_seed(13)
    return Tiny(reference=LlamaForCausalLM(LlamaConfig(**{**SHAPE, **LLAMA_2})).eval()).model()


def _config(name: str, spec: SpecShape) -> EngineConfig:
    _, page_size, depth, _ = NAMED[name]
    return configure(
        page_size=page_size, depth=depth, spec=spec, context=CONTEXT, pool_tokens=40960, chunk=128, max_running=2
    )


def _serve(name: str, config: EngineConfig, head: Head | None) -> Served:
    served = Served(_target(name), config, head=head)
    for number, (prompt, num_new) in enumerate(NAMED[name][3]):
        served.submit(f"r{number}", prompt, num_new)
    served.run()
    return served


@EACH
def test_it_returns_what_plain_decoding_returns_and_every_page(name: str) -> None:
    head = make_head(NAMED[name][0], _target(name))
    served = _serve(name, _config(name, EIGHT), head)
    plain = _serve(name, configure(context=CONTEXT, pool_tokens=2048), None)
    for number, (_, num_new) in enumerate(NAMED[name][3]):
        assert served.output(f"r{number}") == plain.output(f"r{number}"), number
        end = served.finish(f"r{number}")
        assert (end.reason, len(served.output(f"r{number}"))) == ("length", num_new)
        assert end.spec.rounds > 0 or num_new == 1
    assert_every_page_is_back(served)


@EACH
def test_with_rows_that_are_not_widened_it_is_refused_with_the_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head(NAMED[name][0], _target(name))
    narrow = property(lambda resolved: ceil_to(resolved.context, resolved.page_size))
    monkeypatch.setattr(Resolved, "row_width", narrow)
    with pytest.raises(
        InvariantError, match=r"the step needs \d+ positions \(length up to \d+, reserve \d+\), the row"
    ):
        config = _config(name, EIGHT)  # without graphs: capturing one would write past the row before anybody looks
        _serve(name, replace(config, sched=replace(config.sched, graphs=False)), head)
