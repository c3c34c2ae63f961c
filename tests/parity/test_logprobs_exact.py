"""Log-probabilities of output and prompt are transformers' log_softmax, each token's once, however the work is cut."""

from itertools import product

import numpy as np
import pytest

from roost.config.options import EngineConfig
from roost.messages import PromptLogprobs, Submit, TokenLogprob, Tokens
from roost.sampling.params import SamplingParams
from tests.support.slow_reference import slow_logprobs, slow_output
from tests.support.tiny_models import Served, configure, prompts, tiny
from tests.support.workload import CHUNKS, DEPTHS

PROMPT_LEN, NUM_NEW = 33, 12
NEAR = 1e-4
FROMS = (0, 1, 15, 16, 17, PROMPT_LEN - 2, PROMPT_LEN - 1, PROMPT_LEN)  # the last two leave nothing to report
TOPS = (None, 0, 5)


def asked(seed: int = 30) -> list[Submit]:
    """Requests that want logprobs from different places on, greedy and drawn, with and without alternatives."""
    cases = list(product(FROMS, TOPS))
    return [
        Submit(
            request_id=f"from {start}, top {top}",
            tokens=prompt,
            max_new_tokens=NUM_NEW,
            sampling=SamplingParams(temperature=1.3 if number % 2 else 0, frequency_penalty=0.5, seed=number),
            num_top_logprobs=top,
            prompt_logprobs_from=start,
        )
        for number, ((start, top), prompt) in enumerate(
            zip(cases, prompts(*[PROMPT_LEN] * len(cases), seed=seed), strict=True)
        )
    ]


def serve(submits: list[Submit], config: EngineConfig, *, kind: str = "llama", preempt_ticks: int = 0) -> Served:
    """Run requests side by side; preempt all that run every `preempt_ticks`, if told."""
    served = Served(tiny(kind).model(), config)
    for submit in submits:
        served.post(submit)
    served.run(preempt_ticks)
    return served


def prompt_logprobs(served: Served, name: str) -> dict[int, TokenLogprob]:
    """Log-probabilities of prompt tokens by position; in order, and none twice."""
    found: dict[int, TokenLogprob] = {}
    for event in served.events:
        if isinstance(event, PromptLogprobs) and event.request_id == name:
            assert event.logprobs and event.start == max(found, default=event.start - 1) + 1, event
            found |= {event.start + i: entry for i, entry in enumerate(event.logprobs)}
    return found


def output_logprobs(served: Served, name: str) -> list[TokenLogprob]:
    """Log-probabilities of the output's tokens."""
    events = [event for event in served.events if isinstance(event, Tokens) and event.request_id == name]
    return [entry for event in events for entry in event.logprobs]


def assert_exact(served: Served, submits: list[Submit], kind: str = "llama") -> None:
    """Every log-probability is the reference's, and none is missing."""
    for submit in submits:
        name, output = submit.request_id, served.output(submit.request_id)
        assert (name, output) == (name, slow_output(kind, submit)[0])
        expected = slow_logprobs(kind, submit.tokens + output)
        own, theirs = output_logprobs(served, name), prompt_logprobs(served, name)
        assert len(own) == (0 if submit.num_top_logprobs is None else NUM_NEW)
        assert submit.prompt_logprobs_from is not None
        assert list(theirs) == list(range(submit.prompt_logprobs_from + 1, PROMPT_LEN))
        places = theirs | {PROMPT_LEN + i: entry for i, entry in enumerate(own)}
        for place, entry in places.items():
            row = expected[place - 1]
            assert entry.logprob == pytest.approx(row[(submit.tokens + output)[place]], abs=NEAR), (name, place)
            best = (-row).argsort(kind="stable")[: submit.num_top_logprobs or 0]
            assert [id for id, _ in entry.top_logprobs] == best.tolist(), (name, place)
            assert [value for _, value in entry.top_logprobs] == pytest.approx(row[best], abs=NEAR), (name, place)


@DEPTHS
@CHUNKS
@pytest.mark.parametrize("page_size", [1, 16])
def test_logprobs_equal_those_of_transformers(depth: int, chunk: int, page_size: int) -> None:
    assert_exact(serve(asked(), configure(depth=depth, chunk=chunk, page_size=page_size)), asked())


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_logprobs_of_a_model_with_windows_equal_those_of_transformers(kind: str) -> None:
    assert_exact(serve(asked(31), configure(chunk=5), kind=kind), asked(31), kind)


@DEPTHS
@CHUNKS
def test_logprobs_after_preemptions_come_once_each(depth: int, chunk: int) -> None:
    served = serve(asked(), configure(depth=depth, chunk=chunk), preempt_ticks=5)
    assert served.count("suspend") > len(asked())
    assert_exact(served, asked())


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_cached_prefix_is_used_only_up_to_where_logprobs_begin(depth: int, page_size: int) -> None:
    served = Served(tiny("llama").model(), configure(depth=depth, page_size=page_size, chunk=5))
    for submit in asked():
        served.submit(f"{submit.request_id} before", submit.tokens, 1)
    served.run()
    for submit in asked():
        served.post(submit)
    served.run()
    assert_exact(served, asked())
    for submit in asked():
        assert submit.prompt_logprobs_from is not None
        usable = min(submit.prompt_logprobs_from, PROMPT_LEN - 1)
        assert served.finish(submit.request_id).usage.cached_tokens == usable // page_size * page_size


@DEPTHS
def test_a_prompt_is_scored_without_output(depth: int) -> None:
    (prompt,) = prompts(PROMPT_LEN, seed=32)
    submit = Submit(request_id="r", tokens=prompt, max_new_tokens=0, num_top_logprobs=2, prompt_logprobs_from=0)
    served = serve([submit], configure(depth=depth, chunk=5))
    assert served.output("r") == () and served.finish("r").reason == "length"
    logprobs, expected = prompt_logprobs(served, "r"), slow_logprobs("llama", prompt)
    assert list(logprobs) == list(range(1, PROMPT_LEN))
    for place, entry in logprobs.items():
        assert entry.logprob == pytest.approx(expected[place - 1, prompt[place]], abs=NEAR)
        assert [id for id, _ in entry.top_logprobs] == (-expected[place - 1]).argsort(kind="stable")[:2].tolist()


# positions that are scored in one step, on both sides of how many are at one time (256), of one prompt and of several
@pytest.mark.parametrize("lengths", [(256,), (257,), (258,), (513, 3), (514,), (150, 150), (2, 600, 40)], ids=str)
def test_a_chunk_of_any_length_is_scored_to_its_end(lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roost.sched.step_budget._FIRST", 1024)  # tokens of a step before anything is measured
    submits = [
        Submit(request_id=f"r{i}", tokens=prompt, max_new_tokens=0, num_top_logprobs=2, prompt_logprobs_from=0)
        for i, prompt in enumerate(prompts(*lengths, seed=40))
    ]
    served = serve(submits, configure(depth=0, chunk=1024, context=640, page_size=16))
    for submit in submits:
        logprobs, expected = prompt_logprobs(served, submit.request_id), slow_logprobs("llama", submit.tokens)
        assert list(logprobs) == list(range(1, len(submit.tokens)))
        own = expected[np.arange(len(logprobs)), submit.tokens[1:]]
        assert [entry.logprob for entry in logprobs.values()] == pytest.approx(own, abs=NEAR)
        best = (-expected[:-1]).argsort(kind="stable")[:, :2]
        assert [[id for id, _ in entry.top_logprobs] for entry in logprobs.values()] == best.tolist()
    assert [len(event.logprobs) for event in served.events if isinstance(event, PromptLogprobs)] == [
        length - 1 for length in lengths
    ], "one step had all of it"
