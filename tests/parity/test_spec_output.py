"""Failure modes of what speculation returns, on the real device code: ends, options, logprobs, ids, chunked prefill.

A test's number is the mode's.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, Options, SchedConfig
from roost.config.options import SpecConfig
from roost.drafters.eagle import EagleDrafter
from roost.drafters.tree import Trees
from roost.messages import Submit, Tokens
from roost.models.model import Head
from roost.sampling.params import SamplingParams
from roost.spec_shape import DraftKv, SpecShape
from roost.weights.draft import load_head
from tests.support.chain_model import save_chain, token, written
from tests.support.forced_drafts import (
    CHAIN,
    NGRAM,
    TREE,
    assert_every_page_is_back,
    drafted,
    model_of,
    null_prompts,
    plainly,
    told,
    turn,
)
from tests.support.random_heads import make_head, write_eagle3
from tests.support.tiny_models import CPU, SHAPE, Served, Tiny, configure, prompts
from tests.support.workload import DEPTHS

PROMPT, LATER = prompts(10, 5, seed=1)


# --- 26: no output, one token, a stop at once -------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_26_turns_of_no_token_of_one_and_of_a_stop_at_once_go_on_exactly(spec: SpecShape, depth: int) -> None:
    served = drafted(configure(spec=spec, depth=depth))
    served.open("s")
    text: tuple[int, ...] = ()
    for number, (prompt, max_new) in enumerate(zip(null_prompts(9, 5, 4, 6, seed=2), (0, 1, 9, 2), strict=True)):
        text += prompt
        expected = plainly("forgetful", text, max_new)
        stops = frozenset(expected[:1]) if number == 2 else frozenset()
        expected = expected[:1] if number == 2 else expected
        served.post(
            Submit(request_id=f"t{number}", tokens=prompt, max_new_tokens=max_new, stop_token_ids=stops, session_id="s")
        )
        served.run()
        assert served.output(f"t{number}") == expected, number
        assert served.finish(f"t{number}").reason == ("stop" if number == 2 else "length")
        assert served.finish(f"t{number}").usage.completion_tokens == len(expected)
        text += expected
        assert len(served.engine.state.sessions.table["s"].record) == len(text)
    turn(served, "last", LATER, 7)  # its own limit, not one of those before it
    assert served.output("last") == plainly("forgetful", text + LATER, 7)


# --- 28: ends inside an accepted run ----------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_28_stop_token_inside_an_accepted_run_ends_the_output_there(depth: int, at: int) -> None:
    output = plainly("llama", PROMPT, 8)
    assert len(set(output[:5])) == 5
    served = told("llama", configure(spec=NGRAM, depth=depth), [PROMPT + output])
    served.open("s")
    stops = frozenset([output[at]])
    served.post(Submit(request_id="r", tokens=PROMPT, max_new_tokens=8, stop_token_ids=stops, session_id="s"))
    served.run()
    end = served.finish("r")
    assert (served.output("r"), end.reason, end.matched) == (output[: at + 1], "stop", output[at])
    assert (end.spec.drafts_accepted, end.spec.overshoot) == (3, 4 - at)
    turn(served, "next", LATER, 5)
    assert served.output("next") == plainly("llama", PROMPT + output[: at + 1] + LATER, 5)


def test_28_stop_string_inside_an_accepted_run_cuts_text_and_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = ("h", "e", " hell", "o", "x", "y", "z", "<|im_end|>")
    folder = save_chain(tmp_path_factory.mktemp("chain"), *pieces)
    config = EngineConfig(
        model=ModelConfig(weights="fp32", threads=1),
        memory=MemoryConfig(page_size=4, pool_tokens=256, strict_memory=2),
        sched=SchedConfig(max_running=2),
        spec=SpecConfig(spec="ngram", spec_steps=5),
    )
    prompt = tuple(map(token, (*pieces[:7], "h")))  # the text has been there before: drafts are right
    greedy = Options(temperature=0, max_new_tokens=12)
    with LLM(str(folder), config) as llm:
        whole = llm.generate(prompt, greedy).choices[0]
        assert whole.text == written(*pieces[1:7])
        for stop, text, num_tokens in (("lo", "e hel", 3), ("ox", "e hell", 4), ("yz", "e hellox", 6)):
            choice = llm.generate(prompt, replace(greedy, stop=(stop,))).choices[0]
            assert (choice.text, choice.finish_reason, choice.matched) == (text, "stop", stop)
            assert choice.tokens == tuple(map(token, pieces[1:]))[:num_tokens]


# --- 29: options and logprobs -----------------------------------------------------------------------------------------

OPTIONS = {
    "warm": SamplingParams(temperature=0.9, seed=3),
    "narrow": SamplingParams(temperature=1.1, top_k=7, top_p=0.8, seed=4),
    "min_p": SamplingParams(temperature=1.3, min_p=0.2, seed=5),
    "penalties": SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.4),
    "warm penalties": SamplingParams(temperature=0.8, presence_penalty=0.9, frequency_penalty=1.1, seed=6),
    # four tokens far above the rest: each one used makes room for the next, within a round too
    "rivals": SamplingParams(
        temperature=0,
        logit_bias=((5, 60.0), (9, 60.0), (50, 60.0), (77, 60.0)),
        presence_penalty=1.0,
        frequency_penalty=2.0,
    ),
    "bias": SamplingParams(temperature=0, logit_bias=((5, 4.0), (9, 3.5), (50, -80.0))),
}


def _optioned(name: str) -> Submit:
    return Submit(request_id=name, tokens=PROMPT, max_new_tokens=17, sampling=OPTIONS[name], num_top_logprobs=2)


def _logprobs(served: Served, name: str) -> tuple[list[float], list[list[int]]]:
    logprobs = [
        entry
        for event in served.events
        if isinstance(event, Tokens) and event.request_id == name
        for entry in event.logprobs
    ]
    return [entry.logprob for entry in logprobs], [[each for each, _ in entry.top_logprobs] for entry in logprobs]


@pytest.mark.parametrize("name", OPTIONS)
def test_29_options_and_logprobs_are_exact_in_every_round(name: str) -> None:
    plain = Served(model_of("llama"), configure())
    plain.post(_optioned(name))
    plain.run()
    output = plain.output(name)
    assert name == "bias" or output != plainly("llama", PROMPT, 17)  # the option matters
    served = told("llama", configure(spec=NGRAM), [PROMPT + output], [4, 2, 4, 1, 3])
    served.post(_optioned(name))
    served.run()
    assert served.output(name) == output
    assert served.finish(name).spec.histogram == (1, 1, 2, 2)  # what was chosen, and one round past the end
    (found, found_tops), (expected, expected_tops) = _logprobs(served, name), _logprobs(plain, name)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert found_tops == expected_tops and len(found) == 17


# --- 30: ids ----------------------------------------------------------------------------------------------------------


def _small(vocab: int) -> Tiny:
    torch.manual_seed(vocab)
    return Tiny(reference=LlamaForCausalLM(LlamaConfig(**{**SHAPE, "vocab_size": vocab})).eval())


@pytest.mark.parametrize(("vocab", "kept", "topk"), [(101, 9, 8), (23, 11, 7), (13, 13, 8), (61, 5, 5)])
def test_30_no_draft_and_no_token_lies_outside_the_vocabulary(
    vocab: int, kept: int, topk: int, tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _small(vocab).model()
    folder = write_eagle3(tmp_path / "head", {"vocab_size": vocab}, num_tokens=kept)  # type: ignore[operator]
    head = load_head(folder, "eagle3", model, layer_ids=None, weights="fp32", device=CPU)
    propose, drafts = EagleDrafter.propose, []

    def noted(self: EagleDrafter, *arguments: object) -> Trees:
        trees = propose(self, *arguments)  # type: ignore[arg-type]
        drafts.append(trees.tokens)
        return trees

    monkeypatch.setattr(EagleDrafter, "propose", noted)
    spec = SpecShape(steps=3, topk=topk, tokens=17, draft_kv=DraftKv.PAIR)
    work = [tuple(each % vocab for each in prompt) for prompt in prompts(7, 12, seed=3)]
    outputs = []
    for config, drafter in ((configure(spec=spec, pool_tokens=8192), head), (configure(), None)):
        served = Served(model, config, head=drafter)
        for number, prompt in enumerate(work):
            warm = SamplingParams(temperature=5.0, seed=number)
            served.post(Submit(request_id=f"r{number}", tokens=prompt, max_new_tokens=30, sampling=warm))
        served.run()
        outputs.append([served.output(f"r{number}") for number in range(len(work))])
        assert all(served.finish(f"r{number}").reason == "length" for number in range(len(work)))
    assert outputs[0] == outputs[1] and max(max(each) for each in outputs[0]) < vocab
    offered = torch.cat([each[:, 1:].flatten() for each in drafts]).unique()
    usual = set(head.token_ids(torch.arange(kept)).tolist())
    assert set(offered.tolist()) <= usual and max(usual) < vocab


# --- 31: chunked prefill under EAGLE ----------------------------------------------------------------------------------


def _draft_kv(head: Head, prompt: tuple[int, ...], chunk: int) -> Tensor:
    """The draft KV of every position of a prompt, and the first drafts after it, once its prefill has run."""
    served = Served(model_of("llama"), configure(spec=TREE, chunk=chunk, depth=0), head=head)
    served.submit("r", prompt, 1)
    served.run()
    drafter = served.executor.runner.passes.drafter
    assert isinstance(drafter, EagleDrafter)
    cache, at = drafter.kv_cache, torch.arange(len(prompt))
    (row,) = cache.table.pages.any(dim=1).nonzero().flatten().tolist()
    slots = cache.table.slots(torch.full_like(at, row), at)
    return torch.cat([cache.keys[:, slots], cache.values[:, slots]], dim=-1)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_31_draft_kv_after_a_chunked_prefill_is_that_after_a_whole_one(chunk: int, name: str) -> None:
    head = make_head(name, model_of("llama"))
    (prompt,) = prompts(19, seed=4)
    torch.testing.assert_close(_draft_kv(head, prompt, chunk), _draft_kv(head, prompt, 512), rtol=1e-4, atol=1e-4)


def test_31_a_chunked_prefill_under_eagle_returns_every_page() -> None:
    served = drafted(configure(spec=TREE, chunk=3))
    (prompt,) = null_prompts(19, seed=5)
    served.submit("r", prompt, 16)
    served.run()
    assert served.output("r") == plainly("forgetful", prompt, 16)
    found = served.finish("r").spec
    assert found.histogram[-1] == found.rounds > 0
    assert_every_page_is_back(served)
