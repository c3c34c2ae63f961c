"""Speculation over HTTP: what it did is said and adds up, and text, stops and departures are those without it.

Prompts that repeat themselves make the n-gram drafter right; they are shorter than a page, so that no request finds
another's in the cache and all run alike.
"""

from collections.abc import Sequence
from itertools import pairwise

import openai
import pytest

from roost import LLM, EngineConfig, ModelConfig, Options
from roost.front.speculation import from_json, since, total
from roost.messages import SpecStats
from tests.server.conftest import SPEC_STEPS, StartTiny
from tests.support.server_process import Server, Stream, wait_until
from tests.unit.server.test_speculation import scraped, spec_of

COLOURS = "red green blue, red green blue, red green blue, red"
PLAIN = "The owl flew"
PARAMS = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


def sums(server: Server) -> SpecStats:
    """What the server did in all, said twice."""
    wait_until(server.is_at_rest)
    found = from_json(server.stats()["spec"])
    assert scraped(server.http.get("/metrics").text) == found
    assert sum(found.histogram) == found.rounds and len(found.histogram) == SPEC_STEPS + 1
    return found


def test_the_server_says_that_and_how_it_speculates(server: Server) -> None:
    settings = server.http.get("/server_info").json()["settings"]
    told = {name: value for name, value in settings.items() if name.startswith("spec")}
    shape = {"spec_steps": SPEC_STEPS, "spec_topk": 1, "spec_tokens": SPEC_STEPS + 1}
    assert told == {"spec": "eagle3", **shape, "spec_lookup": "shared"}


def test_what_requests_are_told_adds_up_to_what_the_server_says_also_when_they_are_aborted(rested: Server) -> None:
    before = sums(rested)
    metas = [rested.generate({"text": COLOURS, "sampling_params": PARAMS})["meta_info"]]
    body = {"text": [COLOURS, PLAIN], "sampling_params": {**PARAMS, "n": 2}}
    metas += [answer["meta_info"] for answer in rested.generate(body)]
    stopped = {"text": COLOURS, "sampling_params": {**PARAMS, "stop": ", blue"}, "stream": True}
    metas += [event["meta_info"] for event in Stream(rested, "/generate", stopped).rest()[-1:]]
    aborted = Stream(rested, "/generate", {"text": COLOURS, "sampling_params": LONG, "rid": "cut", "stream": True})
    for _ in range(6):
        aborted.next()
    assert rested.post("/abort_request", {"rid": "cut"}).status_code == 200
    metas.append(aborted.rest()[-1]["meta_info"])
    assert metas[-1]["finish_reason"]["type"] == "abort"
    told = [spec_of(meta) for meta in metas]  # every key is there, and they agree with each other
    assert total(told) == since(before, sums(rested))
    for meta, spec in zip(metas[:5], told[:5], strict=True):  # ran to their end; the first token is of no round
        assert meta["completion_tokens"] == 1 + spec.rounds + spec.drafts_accepted - spec.overshoot
        assert spec.drafts_offered == spec.rounds * SPEC_STEPS
    assert told[0].accept_length > 1.5


def test_a_stream_of_several_tokens_an_event_decodes_to_the_same_text(rested: Server, client: openai.OpenAI) -> None:
    whole = rested.generate({"text": COLOURS, "sampling_params": PARAMS})
    events = Stream(rested, "/generate", {"text": COLOURS, "sampling_params": PARAMS, "stream": True}).rest()
    lengths = [0, *(len(event["output_ids"]) for event in events)]
    assert max(after - before for before, after in pairwise(lengths)) > 1
    assert (events[-1]["text"], events[-1]["output_ids"]) == (whole["text"], whole["output_ids"])
    assert all(whole["text"].startswith(event["text"]) for event in events)
    asked = {"temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    chunks = client.completions.create(model="default", prompt=COLOURS, stream=True, **asked)  # type: ignore[call-overload]
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == whole["text"]
    assert len([piece for piece in pieces if piece]) < len(whole["output_ids"])


@pytest.mark.parametrize(("stream", "lengths"), [(False, range(5, 10)), (True, range(5, 10))])
def test_an_output_that_ends_inside_an_accepted_run_ends_there(
    rested: Server, stream: bool, lengths: Sequence[int]
) -> None:
    def ask(**more: object) -> dict[str, object]:
        body = {"text": COLOURS, "sampling_params": {**PARAMS, **more}, "stream": stream}
        return Stream(rested, "/generate", body).rest()[-1] if stream else rested.generate(body)

    free, before = ask(), sums(rested)
    ids, text = free["output_ids"], free["text"]
    assert isinstance(ids, list) and isinstance(text, str)
    for length in lengths:  # one after the other: every place in a run
        cut = ask(max_new_tokens=length)
        assert cut["output_ids"] == ids[:length]
        assert text.startswith(str(cut["text"]))
    by_id = ask(stop_token_ids=[ids[6]])
    assert by_id["output_ids"] == ids[: ids.index(ids[6]) + 1]
    for stop in (text[11:15], text[5:14]):  # tokens of one run, and of two
        found = ask(stop=stop)
        assert stop in text and found["text"] == text.partition(stop)[0]
        assert found["output_ids"] == ids[: len(found["output_ids"])]  # type: ignore[arg-type]
    assert since(before, sums(rested)).overshoot > 0


def test_who_leaves_in_the_middle_of_a_run_changes_nothing_for_those_beside(rested: Server) -> None:
    alone = rested.generate({"text": COLOURS, "sampling_params": PARAMS})
    leaving = [
        Stream(rested, "/generate", {"text": COLOURS, "sampling_params": LONG, "stream": True}) for _ in range(3)
    ]
    for number, stream in enumerate(leaving):
        for _ in range(2 + number):
            stream.next()
    before = from_json(rested.stats()["spec"])
    beside = Stream(rested, "/generate", {"text": COLOURS, "sampling_params": PARAMS, "stream": True})
    beside.next()
    for stream in leaving:
        stream.close()
    last = beside.rest()[-1]
    assert (last["output_ids"], last["text"]) == (alone["output_ids"], alone["text"])
    assert spec_of(last["meta_info"]) == spec_of(alone["meta_info"])
    assert since(before, sums(rested)).rounds >= spec_of(last["meta_info"]).rounds


def test_a_server_that_speculates_says_what_the_library_says_without(start_tiny: StartTiny) -> None:
    server = start_tiny("--weights", "fp32", "--spec", "ngram", "--spec-steps", "4", "--strict-memory", "2")
    model = str(server.http.get("/server_info").json()["settings"]["model"])
    prompts = ["hello", "owl owl owl owl owl", "one two three one two three one", "x"]
    answers = server.generate({"text": prompts, "sampling_params": {**PARAMS, "max_new_tokens": 100}})
    with LLM(config=EngineConfig(model=ModelConfig(model=model, weights="fp32", threads=1))) as llm:
        plain = llm.generate_all(prompts, Options(temperature=0, max_new_tokens=100, ignore_eos=True))
    assert [tuple(answer["output_ids"]) for answer in answers] == [output.choices[0].tokens for output in plain]
    assert total(spec_of(answer["meta_info"]) for answer in answers).drafts_accepted > 0
    server.check_rest()


def test_a_server_with_a_wrong_flag_ends_and_names_it(start_tiny: StartTiny) -> None:
    with pytest.raises(AssertionError, match="roost: --spec eagle3 needs --draft, the folder of its head") as ended:
        start_tiny("--spec", "eagle3")
    assert "Fatal" not in str(ended.value)  # and says nothing else
