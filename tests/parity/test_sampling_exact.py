"""With every sampling option the engine returns what a slow dense reference returns, whatever happens around it."""

from collections import Counter
from dataclasses import replace

import pytest

from roost.config.options import EngineConfig
from roost.messages import Submit
from roost.sampling.params import SEED_END, SamplingParams
from tests.support.slow_reference import slow_output
from tests.support.tiny_models import VOCAB, Served, configure, prompts, tiny
from tests.support.workload import CHUNKS, DEPTHS, PAGE_SIZES

STOPS = frozenset(range(0, VOCAB, 4))  # so many that an output soon meets one
FEW = (3, 17, 41, 60, 88)

SAMPLINGS = {
    "warm": SamplingParams(seed=1),
    "cold": SamplingParams(temperature=0.3, seed=2),
    "hot": SamplingParams(temperature=2.5, seed=SEED_END - 1),
    "top_k": SamplingParams(top_k=5, seed=3),
    "top_k of one": SamplingParams(top_k=1, seed=4),
    "top_k past the vocabulary": SamplingParams(top_k=VOCAB + 7, temperature=1.5, seed=5),
    "top_p": SamplingParams(top_p=0.6, temperature=2.0, seed=6),
    "a tiny top_p": SamplingParams(top_p=0.01, temperature=2.0, seed=7),
    "min_p": SamplingParams(min_p=0.08, temperature=1.8, seed=28),
    "top_k, top_p and min_p": SamplingParams(top_k=20, top_p=0.8, min_p=0.02, temperature=2.0, seed=9),
    "repetition": SamplingParams(repetition_penalty=1.4, temperature=0),
    "repetition sought": SamplingParams(repetition_penalty=0.6, temperature=1.3, seed=10),
    "presence": SamplingParams(presence_penalty=2.0, temperature=0.7, seed=11),
    "frequency": SamplingParams(frequency_penalty=1.5, temperature=0),
    "frequency sought": SamplingParams(frequency_penalty=-1.2, temperature=1.2, seed=12),
    "all penalties": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.9, top_k=30, temperature=1.1, seed=13
    ),
    "bias": SamplingParams(logit_bias=tuple((token, 9.0) for token in FEW), temperature=0),
    "bias away": SamplingParams(logit_bias=tuple((token, -100.0) for token in range(0, 90)), seed=14),
    "bias and penalties": SamplingParams(
        logit_bias=tuple((token, 12.0) for token in FEW), presence_penalty=1.7, frequency_penalty=2.0, seed=15
    ),
}
SUBMITS = {
    **{name: {"sampling": sampling} for name, sampling in SAMPLINGS.items()},
    "greedy": {"sampling": SamplingParams(temperature=0)},
    "greedy to a stop id": {"sampling": SamplingParams(temperature=0), "stop_token_ids": STOPS},
    "to a stop id": {"sampling": SamplingParams(temperature=1.5, seed=16), "stop_token_ids": STOPS},
    "not before": {"sampling": SamplingParams(temperature=0), "stop_token_ids": STOPS, "min_new_tokens": 9},
    "not before, drawn": {
        "sampling": SamplingParams(temperature=1.4, top_p=0.9, seed=17),
        "stop_token_ids": STOPS,
        "min_new_tokens": 6,
    },
    "not before, penalised": {
        "sampling": SamplingParams(temperature=1.4, repetition_penalty=1.3, frequency_penalty=0.4, seed=18),
        "stop_token_ids": STOPS,
        "min_new_tokens": 12,
    },
}


def asked(prompt_len: int = 0, num_new: int = 16, seed: int = 20) -> list[Submit]:
    """One request for each set of options; prompts of one length if told, else of many."""
    lengths = [prompt_len or 3 + 5 * number % 23 for number in range(len(SUBMITS))]
    return [
        Submit(request_id=name, tokens=prompt, max_new_tokens=num_new, **options)
        for (name, options), prompt in zip(SUBMITS.items(), prompts(*lengths, seed=seed), strict=True)
    ]


def serve(submits: list[Submit], config: EngineConfig, kind: str = "llama") -> Served:
    """Run requests side by side."""
    served = Served(tiny(kind).model(), config)
    for submit in submits:
        served.post(submit)
    served.run()
    return served


def assert_exact(served: Served, submits: list[Submit], kind: str = "llama") -> None:
    """Every output, and why it ended, is the reference's."""
    for submit in submits:
        output, reason = slow_output(kind, submit)
        end = served.finish(submit.request_id)
        assert (submit.request_id, served.output(submit.request_id)) == (submit.request_id, output)
        assert end.reason == reason
        assert end.matched == (output[-1] if reason == "stop" else None)
        assert end.usage.completion_tokens == len(output)


def test_the_requests_try_what_they_are_meant_to() -> None:
    outputs = {each.request_id: slow_output("llama", each) for each in asked()}
    greedy = {
        each.request_id: slow_output("llama", replace(each, sampling=SamplingParams(temperature=0)))[0]
        for each in asked()
    }
    unchanged = {name for name, (output, _) in outputs.items() if output == greedy[name]}
    assert unchanged <= {"top_k of one", "a tiny top_p", "greedy", "greedy to a stop id", "not before"}
    for name, (output, reason) in outputs.items():
        stops = "stop" in name or "before" in name
        assert (reason == "stop") == stops, (name, reason)
        least = SUBMITS[name].get("min_new_tokens", 0)
        assert len(output) > least and not STOPS & set(output[:least]), (name, output)


@DEPTHS
def test_a_request_alone_is_exact(depth: int) -> None:
    served = Served(tiny("llama").model(), configure(depth=depth))
    for submit in asked():
        served.post(submit)
        served.run()
    assert_exact(served, asked())


@DEPTHS
@PAGE_SIZES
@CHUNKS
def test_a_request_beside_others_is_exact(depth: int, page_size: int, chunk: int) -> None:
    config = configure(depth=depth, page_size=page_size, chunk=chunk, max_running=9)
    assert_exact(serve(asked(), config), asked())


@DEPTHS
@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_a_request_of_windows_and_full_layers_is_exact(kind: str, depth: int) -> None:
    submits = asked(seed=21)
    assert_exact(serve(submits, configure(depth=depth, chunk=5), kind), submits, kind)


@DEPTHS
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (4, 5), (16, 512)])
def test_a_request_preempted_time_and_again_is_exact(depth: int, page_size: int, chunk: int) -> None:
    served = Served(tiny("llama").model(), configure(depth=depth, page_size=page_size, chunk=chunk))
    for submit in asked():
        served.post(submit)
    served.run(preempt_ticks=7)
    suspended = Counter(subject for kind, subject, _ in served.notes if kind == "suspend")
    assert len(suspended) > len(SUBMITS) / 2 and max(suspended.values()) > 1, suspended
    assert_exact(served, asked())


@DEPTHS
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (4, 512), (16, 5)])
def test_a_request_preempted_for_want_of_pages_is_exact(depth: int, page_size: int, chunk: int) -> None:
    submits = sorted(asked(prompt_len=11, num_new=30, seed=24), key=lambda each: each.sampling.penalises)[-14:]
    served = serve(submits, configure(depth=depth, page_size=page_size, chunk=chunk, pool_tokens=112))
    preempted = {subject for kind, subject, numbers in served.notes if kind == "suspend" and numbers[0] > 14}
    assert any(each.sampling.penalises for each in submits if each.request_id in preempted), preempted
    assert_exact(served, submits)


@DEPTHS
@PAGE_SIZES
def test_a_prompt_found_in_the_prefix_tree_is_exact(depth: int, page_size: int) -> None:
    (prompt,) = prompts(37, seed=23)
    submits = [replace(each, tokens=prompt) for each in asked()]
    served = Served(tiny("llama").model(), configure(depth=depth, page_size=page_size, chunk=5))
    served.submit("first", prompt, 1)
    served.run()
    for submit in submits:
        served.post(submit)
    served.run()
    assert_exact(served, submits)
    assert {served.finish(each.request_id).usage.cached_tokens for each in submits} == {36 // page_size * page_size}


@DEPTHS
def test_the_same_seed_at_the_same_place_draws_the_same_whatever_the_row(depth: int) -> None:
    (prompt,) = prompts(9, seed=23)
    names = [f"r{number}" for number in range(7)]
    same = [
        Submit(request_id=name, tokens=prompt, max_new_tokens=20, sampling=SamplingParams(seed=99)) for name in names
    ]
    served = serve(same, configure(depth=depth, max_running=3))
    assert {served.output(name) for name in names} == {slow_output("llama", same[0])[0]}
