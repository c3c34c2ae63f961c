"""Several outputs of one prompt: they share its pages, and each is what it would be alone."""

from dataclasses import replace

import pytest

from roost.front.options import Options, submits
from roost.messages import PromptLogprobs, Submit
from tests.support.slow_reference import slow_output
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_models import Served, configure, prompts, tiny
from tests.support.workload import DEPTHS, PAGE_SIZES

N = 5
PROMPT_LEN = 38
OPTIONS = Options(n=N, max_new_tokens=14, temperature=1.4, top_k=40, presence_penalty=0.4, seed=5, ignore_eos=True)


def asked(options: Options = OPTIONS, seed: int = 40) -> list[Submit]:
    """The engine's requests for one prompt."""
    (prompt,) = prompts(PROMPT_LEN, seed=seed)
    return submits("r", prompt, options, byte_level())


def serve(asks: list[Submit], *, depth: int = 1, page_size: int = 4, chunk: int = 512) -> Served:
    """Run requests side by side."""
    served = Served(tiny("llama").model(), configure(depth=depth, page_size=page_size, chunk=chunk))
    for submit in asks:
        served.post(submit)
    served.run()
    return served


@DEPTHS
@PAGE_SIZES
def test_followers_find_every_full_page_of_the_prompt(depth: int, page_size: int) -> None:
    served = serve(asked(), depth=depth, page_size=page_size, chunk=5)
    cached = [served.finish(each.request_id).usage.cached_tokens for each in asked()]
    assert cached == [0] + [(PROMPT_LEN - 1) // page_size * page_size] * (N - 1)


@DEPTHS
@PAGE_SIZES
def test_each_output_equals_that_of_a_request_alone_with_its_seed(depth: int, page_size: int) -> None:
    served = serve(asked(), depth=depth, page_size=page_size)
    outputs = [served.output(each.request_id) for each in asked()]
    assert outputs == [slow_output("llama", each)[0] for each in asked()]
    assert len(set(outputs)) == N, "the seeds must differ"
    alone = replace(asked()[3], request_id="alone", shares_with=None)
    assert serve([alone], depth=depth).output("alone") == outputs[3]


@DEPTHS
def test_the_first_output_is_the_same_whatever_n_is(depth: int) -> None:
    one = serve(asked(replace(OPTIONS, n=1)), depth=depth)
    assert one.output("r") == serve(asked(), depth=depth).output("r")


@DEPTHS
def test_pages_of_the_prompt_are_held_once_while_all_outputs_run(depth: int) -> None:
    page_size, new_pages = 4, 5  # of an output: its own part of the prompt's last page, 14 tokens, a round's reserve
    served = Served(tiny("llama").model(), configure(depth=depth, page_size=page_size))
    for submit in asked():
        served.post(submit)
    most = 0
    while served.engine.has_work:
        served.engine.tick()
        ledger = served.engine.state.store.ledger
        used = served.engine.state.resolved.books[0].num_pages - 1 - ledger.num_free(0)
        if len(served.engine.state.running) == N:
            most = max(most, used)
    assert 0 < most <= PROMPT_LEN // page_size + N * new_pages


@DEPTHS
def test_the_prompt_is_scored_once_for_all_outputs(depth: int) -> None:
    served = serve(asked(replace(OPTIONS, prompt_logprobs_from=0, logprobs=1)), depth=depth, chunk=5)
    events = [event for event in served.events if isinstance(event, PromptLogprobs)]
    assert {event.request_id for event in events} == {"r"}
    assert sum(len(event.logprobs) for event in events) == PROMPT_LEN - 1
    cached = [served.finish(each.request_id).usage.cached_tokens for each in asked()]
    assert cached == [0] + [36] * (N - 1)


@pytest.mark.parametrize("ended", ["stop", "length"])
def test_a_first_output_that_ends_at_once_does_not_keep_the_others_waiting(ended: str) -> None:
    greedy = replace(OPTIONS, temperature=0, presence_penalty=0.0, max_new_tokens=1 if ended == "length" else 14)
    (first, *_) = slow_output("llama", asked(greedy)[0])[0]
    stop_ids = (first,) if ended == "stop" else ()
    asks = asked(replace(greedy, stop_token_ids=stop_ids))
    served = serve(asks)
    assert [served.output(each.request_id) for each in asks] == [(first,)] * N
    assert {served.finish(each.request_id).reason for each in asks} == {ended}
