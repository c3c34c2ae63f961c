"""What the server says about speculation, request by request and in all, adds up; on an engine that speculates."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from roost.front.options import Options
from roost.front.speculation import as_json, from_json, since, total
from roost.library.llm import LLM
from roost.messages import SpecStats
from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.engine_process import EngineProcess
from roost.server.metrics import Metrics
from roost.server.native import _speculation
from roost.server.state import ServerState
from tests.support import speculating_engine as speculating

Value = TypeVar("Value")
MADE = SpecStats(
    rounds=4,
    drafts_offered=12,
    drafts_accepted=6,
    overshoot=1,
    lookup_rounds=2,
    lookup_offered=7,
    lookup_accepted=5,
    histogram=(1, 1, 1, 1),
)
PARAMS = {"temperature": 0, "max_new_tokens": 21, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("roost.library.llm.start", speculating.start)
        with LLM() as llm:
            yield llm


def ask(llm: LLM, work: Callable[[httpx.AsyncClient], Awaitable[Value]]) -> Value:
    """What comes of some requests to a server over the engine."""

    async def run() -> Value:
        server = ServerState(ServerConfig(), cast(EngineProcess, speculating.LocalEngine(llm)))
        server.open()
        transport = httpx.ASGITransport(app=make_app(server))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await work(http)

    return asyncio.run(run())


async def generate(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of /generate; the events, if it is a stream."""
    answer = await http.post("/generate", json={"sampling_params": PARAMS, **body})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]
    found = answer.json()
    return found if isinstance(found, list) else [found]


def spec_of(meta: dict[str, Any]) -> SpecStats:
    """A request's statistics, by their names in meta_info."""
    spec = SpecStats(
        rounds=meta["spec_verify_ct"],
        drafts_offered=meta["spec_num_proposed_drafts"],
        drafts_accepted=meta["spec_num_correct_drafts"],
        drafts_forced=meta["spec_forced"],
        overshoot=meta["spec_overshoot"],
        lookup_rounds=meta["spec_lookup_rounds"],
        lookup_offered=meta["spec_num_proposed_lookup_drafts"],
        lookup_accepted=meta["spec_num_correct_lookup_drafts"],
        histogram=tuple(meta["spec_correct_drafts_histogram"]),
    )
    assert meta["spec_accept_length"] == spec.accept_length
    assert meta["spec_accept_rate"] == spec.drafts_accepted / spec.drafts_offered
    older = (meta["spec_accept_token_num"], meta["spec_draft_token_num"], tuple(meta["spec_accept_histogram"]))
    assert older == (spec.drafts_accepted, spec.drafts_offered, spec.histogram)
    return spec


async def info(http: httpx.AsyncClient) -> SpecStats:
    """The sums that /server_info has."""
    spec = (await http.get("/server_info")).json()["stats"]["spec"]
    assert spec["accept_length"] == from_json(spec).accept_length
    return from_json(spec)


def scraped(text: str) -> SpecStats:
    """The sums that /metrics has."""
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    found = {each.name: int(each.value) for each in samples if each.name.startswith("roost_spec_")}
    buckets = [
        (each.labels["le"], int(each.value)) for each in samples if each.name == "roost_spec_accept_length_bucket"
    ]
    ends, counts = zip(*buckets, strict=True)
    assert ends == (*(f"{accept_len}.0" for accept_len in range(1, len(ends))), "+Inf")
    assert counts[-1] == counts[-2] == found["roost_spec_accept_length_count"] == found["roost_spec_rounds_total"]
    accepted = found["roost_spec_drafts_accepted_total"]
    assert found["roost_spec_accept_length_sum"] == counts[-1] + accepted
    return SpecStats(
        rounds=counts[-1],
        drafts_offered=found["roost_spec_drafts_offered_total"],
        drafts_accepted=accepted,
        drafts_forced=found["roost_spec_drafts_forced_total"],
        overshoot=found["roost_spec_overshoot_tokens_total"],
        lookup_rounds=found["roost_spec_lookup_rounds_total"],
        lookup_offered=found["roost_spec_lookup_drafts_offered_total"],
        lookup_accepted=found["roost_spec_lookup_drafts_accepted_total"],
        histogram=tuple(after - before for before, after in zip((0, *counts), counts[:-1], strict=False)),
    )


def test_the_sum_over_requests_is_what_server_info_and_metrics_say(llm: LLM) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        before = await info(http)
        answers = await generate(http, {"text": "alone"})
        answers += await generate(http, {"text": ["one", "two", "three"]})
        answers += await generate(http, {"text": "many", "sampling_params": {**PARAMS, "n": 3}})
        streamed = await generate(http, {"text": ["a", "b"], "sampling_params": {**PARAMS, "n": 2}, "stream": True})
        answers += [event for event in streamed if event["meta_info"]["finish_reason"]]
        assert len(answers) == 1 + 3 + 3 + 4
        sums, now = total(spec_of(answer["meta_info"]) for answer in answers), await info(http)
        assert sums == since(before, now)
        assert scraped((await http.get("/metrics")).text) == now
        assert sums.overshoot > 0 and all(sums.histogram) and len(sums.histogram) == speculating.STEPS + 1
        assert sums.rounds == sum(sums.histogram) and 1 < sums.accept_length < speculating.STEPS + 1

    ask(llm, work)


def test_a_request_of_many_says_only_what_was_done_for_it(llm: LLM) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        (alone,) = await generate(http, {"text": "one"})
        among = await generate(http, {"text": ["two", "one", "three"]})
        assert among[1]["output_ids"] == alone["output_ids"]
        assert spec_of(among[1]["meta_info"]) == spec_of(alone["meta_info"])

    ask(llm, work)


def test_a_stream_says_it_with_the_last_event_of_each_output(llm: LLM) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        events = await generate(http, {"text": "x", "sampling_params": {**PARAMS, "n": 2}, "stream": True})
        for index in (0, 1):
            metas = [event["meta_info"] for event in events if event["index"] == index]
            has_spec = [any(name.startswith("spec_") for name in meta) for meta in metas]
            assert len(metas) > 2 and has_spec == [False] * (len(metas) - 1) + [True]

    ask(llm, work)


def test_what_an_openai_client_gets_keeps_to_its_schema(llm: LLM) -> None:
    async def work(http: httpx.AsyncClient) -> None:
        body = {"model": "default", "prompt": "x", "max_tokens": 9, "ignore_eos": True}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert set(answer["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
        assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}

    ask(llm, work)


def test_where_nothing_is_drafted_meta_info_says_nothing_and_metrics_are_zero(llm: LLM) -> None:
    assert _speculation(SpecStats()) == _speculation(SpecStats(histogram=(0,))) == {}
    plain = replace(llm.stats(), spec=SpecStats(histogram=(0,)))
    assert scraped(Metrics().exposition(plain, 4).decode()) == SpecStats(histogram=(0,))


def test_totals_count_what_was_looked_up_beside_a_head_too_and_it_is_said_apart(llm: LLM) -> None:
    assert spec_of(_speculation(MADE)) == MADE
    text = Metrics().exposition(replace(llm.stats(), spec=MADE), 4).decode()
    assert "roost_spec_drafts_offered_total 12.0" in text and "roost_spec_lookup_drafts_offered_total 7.0" in text
    assert "roost_spec_drafts_accepted_total 6.0" in text and "roost_spec_lookup_drafts_accepted_total 5.0" in text
    assert "roost_spec_rounds_total 4.0" in text and "roost_spec_lookup_rounds_total 2.0" in text
    alone = replace(MADE, lookup_rounds=0, lookup_offered=0, lookup_accepted=0)
    assert spec_of(_speculation(alone)) == alone, "zeros, where one drafter drafts alone"


def test_metrics_hold_a_histogram_of_accept_lengths(llm: LLM) -> None:
    text = Metrics().exposition(replace(llm.stats(), spec=MADE), 4).decode()
    assert scraped(text) == MADE
    assert "# TYPE roost_spec_accept_length histogram" in text
    assert 'roost_spec_accept_length_bucket{le="2.0"} 2.0' in text
    assert "roost_spec_accept_length_sum 10.0" in text


def test_metrics_hold_a_histogram_of_draft_lengths(llm: LLM) -> None:
    text = Metrics().exposition(replace(llm.stats(), draft_lengths=(3, 0, 2)), 4).decode()
    assert 'roost_spec_draft_length_bucket{le="0.0"} 3.0' in text
    assert 'roost_spec_draft_length_bucket{le="2.0"} 5.0' in text
    assert "roost_spec_draft_length_count 5.0" in text and "roost_spec_draft_length_sum 4.0" in text


def test_rounds_are_counted_by_their_drafts(llm: LLM) -> None:
    before = llm.stats()
    llm.generate("ab", Options(max_new_tokens=20))
    after, spec = llm.stats(), since(before.spec, llm.stats().spec)
    lengths = [b - a for a, b in zip(before.draft_lengths, after.draft_lengths, strict=True)]
    assert lengths == [0] * speculating.STEPS + [spec.rounds] and spec.rounds > 0
    assert spec.draft_length == as_json(spec)["draft_length"] == speculating.STEPS
