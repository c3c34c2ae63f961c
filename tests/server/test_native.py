"""SGLang's native API, in every form that is documented, against a real server with the real default model."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from roost.cli.main import main
from tests.server.test_ends import in_background
from tests.support.server_process import Server, Stream, wait_until

COUNT = "One, two, three, four,"
GREEDY = {"temperature": 0, "max_new_tokens": 6}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


def ids_of(server: Server, text: str) -> list[int]:
    """Token ids of a text, as the server reads it."""
    scored = server.generate(
        {"text": text, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    )
    return [token for _, token, _ in scored["meta_info"]["input_token_logprobs"]]


def test_text_and_ids_one_or_a_list_give_the_same(server: Server) -> None:
    ids = ids_of(server, COUNT)
    one = server.generate({"text": COUNT, "sampling_params": GREEDY})
    assert "five" in one["text"]
    assert server.generate({"input_ids": ids, "sampling_params": GREEDY})["output_ids"] == one["output_ids"]
    for many in ({"text": [COUNT, COUNT]}, {"input_ids": [ids, ids]}):
        answers = server.generate({**many, "sampling_params": GREEDY})
        assert [answer["text"] for answer in answers] == [one["text"]] * 2
    alone = server.generate({"text": [COUNT], "sampling_params": GREEDY})
    assert isinstance(alone, list) and alone[0]["text"] == one["text"]


def test_meta_info_says_who_how_long_and_why(server: Server) -> None:
    answer = server.generate({"text": COUNT, "sampling_params": GREEDY, "rid": "owl 🦉 / ?"})
    meta = answer["meta_info"]
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert meta["id"] == "owl 🦉 / ?"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert meta["prompt_tokens"] == len(ids_of(server, COUNT))
    assert meta["completion_tokens"] == len(answer["output_ids"]) == 6
    assert 0 <= meta["cached_tokens"] <= meta["prompt_tokens"]
    assert meta["e2e_latency"] > 0


def test_each_prompt_may_have_its_own_options_and_name(server: Server) -> None:
    params = [{**GREEDY, "max_new_tokens": 2}, {**GREEDY, "max_new_tokens": 4}]
    answers = server.generate({"text": [COUNT, "The sky is"], "sampling_params": params, "rid": ["a", "b"]})
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == [2, 4]
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


def test_several_outputs_of_one_prompt(server: Server) -> None:
    answers = server.generate({"text": COUNT, "sampling_params": {"n": 3, "max_new_tokens": 5, "seed": 1}})
    assert len(answers) == 3
    assert len({answer["meta_info"]["id"] for answer in answers}) == 3
    body = {"text": COUNT, "sampling_params": {"n": 3, "max_new_tokens": 5, "seed": 1}, "stream": True}
    last = {event["index"]: event["text"] for event in Stream(server, "/generate", body).rest()}
    assert last == dict(enumerate(answer["text"] for answer in answers))


def test_a_stream_repeats_the_text_so_far(server: Server) -> None:
    whole = server.generate({"text": COUNT, "sampling_params": GREEDY})
    events = Stream(server, "/generate", {"text": COUNT, "sampling_params": GREEDY, "stream": True}).rest()
    assert len(events) > 2
    for before, after in pairwise(events):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_log_probabilities_of_output_and_prompt(server: Server) -> None:
    ids = ids_of(server, COUNT)
    body = {"text": COUNT, "sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 3}
    answer = server.generate({**body, "logprob_start_len": 2, "return_text_in_logprobs": True})
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert "".join(text for _, _, text in meta["output_token_logprobs"]) == answer["text"]
    for (value, token, _), tops in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        values = [top for top, _, _ in tops]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        assert tops[0][:2] == [value, token]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == ids[2:]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(value <= 0 for value, _, _ in meta["input_token_logprobs"][1:])
    assert len(meta["input_top_logprobs"]) == len(ids) - 2
    plain = server.generate(body)["meta_info"]
    assert "input_token_logprobs" not in plain
    assert plain["output_token_logprobs"][0][2] is None
    assert "output_token_logprobs" not in server.generate({"text": COUNT, "sampling_params": GREEDY})["meta_info"]


def test_stops_by_text_and_by_id_and_what_is_shown_of_them(server: Server) -> None:
    params = {"temperature": 0, "max_new_tokens": 20}
    free = server.generate({"text": COUNT, "sampling_params": params})
    cut = server.generate({"text": COUNT, "sampling_params": {**params, "stop": ["seven", "nope"]}})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": "seven"}
    assert cut["text"] == free["text"].partition("seven")[0]
    kept = server.generate({"text": COUNT, "sampling_params": {**params, "stop": "seven", "no_stop_trim": True}})
    assert kept["text"] == cut["text"] + "seven"
    token = free["output_ids"][3]
    by_id = server.generate({"text": COUNT, "sampling_params": {**params, "stop_token_ids": [token]}})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    first = free["output_ids"].index(token)
    assert by_id["output_ids"] == free["output_ids"][: first + 1]
    kept = server.generate(
        {"text": COUNT, "sampling_params": {**params, "stop_token_ids": [token], "no_stop_trim": True}}
    )
    assert kept["text"].startswith(by_id["text"]) and len(kept["text"]) > len(by_id["text"])


def test_special_tokens_are_shown_only_when_asked_for(server: Server) -> None:
    assert len(ids_of(server, "<|im_start|>")) > 1  # a plain prompt spells, it does not command
    eos = 2
    params = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True, "logit_bias": {str(eos): 100}}
    hidden = server.generate({"text": "a", "sampling_params": params})
    shown = server.generate({"text": "a", "sampling_params": {**params, "skip_special_tokens": False}})
    assert hidden["output_ids"] == shown["output_ids"] == [eos] * 3
    assert (hidden["text"], shown["text"]) == ("", "<|im_end|>" * 3)


def test_aborting_by_name_ends_that_one_alone(rested: Server) -> None:
    streams = {}
    for rid in ("left", "right"):
        body = {"text": COUNT, "sampling_params": {**LONG, "n": 2}, "rid": rid, "stream": True}
        streams[rid] = Stream(rested, "/generate", body)
        streams[rid].next()
    assert rested.post("/abort_request", {"rid": "left"}).json() == {"success": True}
    ends = [event["meta_info"]["finish_reason"] for event in streams["left"].rest()]
    assert [end for end in ends if end] == [{"type": "abort", "message": "aborted"}] * 2
    assert streams["right"].next()["meta_info"]["finish_reason"] is None
    assert rested.stats()["running"] == 2
    assert rested.post("/abort_request", {"rid": "nobody"}).status_code == 200
    rested.post("/abort_request", {"rid": "right"})
    streams["right"].rest()


def test_aborting_all_ends_what_runs_and_what_waits(rested: Server) -> None:
    whole = in_background(lambda: rested.generate({"text": [COUNT] * 40, "sampling_params": {**LONG, "n": 1}}))
    wait_until(lambda: rested.stats()["running"] > 0)
    stats = rested.stats()
    assert stats["running"] + stats["queued"] == 40
    assert rested.post("/flush_cache").status_code == 409
    assert rested.post("/abort_request", {"abort_all": True}).status_code == 200
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in whole()} == {"abort"}


def test_a_flush_empties_the_cache(rested: Server) -> None:
    rested.generate({"text": COUNT * 5, "sampling_params": GREEDY})
    wait_until(rested.is_at_rest)
    assert rested.stats()["pools"][0]["cached"] > 0
    flushed = rested.post("/flush_cache").json()
    assert flushed["success"] and flushed["num_pages"] > 0
    pool = rested.stats()["pools"][0]
    assert (pool["cached"], pool["free"]) == (0, pool["total"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_name_in_use_is_refused_and_its_owner_goes_on(rested: Server, stream: bool) -> None:
    body = {"text": COUNT, "sampling_params": LONG, "rid": "mine", "stream": True}
    owner = Stream(rested, "/generate", body)
    owner.next()
    for rids, text in (("mine", COUNT), (["other", "mine"], [COUNT, COUNT])):
        answer = rested.post("/generate", {**body, "text": text, "rid": rids, "stream": stream})
        if answer.status_code == 200:  # another output had begun: the error is in the stream
            assert '"code":409' in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["param"]) == (409, "rid")
    assert owner.next()["meta_info"]["finish_reason"] is None
    wait_until(lambda: rested.stats()["running"] == 1)
    owner.close()
    wait_until(rested.is_at_rest)
    again = rested.generate({"text": COUNT, "sampling_params": GREEDY, "rid": "mine"})
    assert again["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("rid", ["", "a#1", "x" * 257, ["a", "a"], ["a"], 7])
def test_a_name_that_could_be_anothers_is_refused(server: Server, rid: Any) -> None:
    answer = server.post("/generate", {"text": [COUNT, COUNT], "sampling_params": GREEDY, "rid": rid})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")


BAD: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "text"),
    ({"text": "a", "input_ids": [1]}, "text"),
    ({"text": []}, "text"),
    ({"text": ""}, "text"),
    ({"text": ["a"] * 257}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids"),
    ({"input_ids": [1, -1]}, "input_ids"),
    ({"input_ids": [1, 49152]}, "input_ids"),
    ({"input_ids": [1, True]}, "input_ids"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"text": "a", "sampling_params": {"n": 65}}, "sampling_params.n"),
    ({"text": ["a"] * 200, "sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"text": ["a"], "sampling_params": [{"top_p": 2}]}, "sampling_params[0].top_p"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
    ({"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 1}}, "sampling_params.seed"),
    ({"text": "a", "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 1}}, "sampling_params.min_new_tokens"),
    ({"text": "a", "sampling_params": {"timeout": 0}}, "sampling_params.timeout"),
    ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"),
    ({"text": "a", "sampling_params": {"regex": "a", "ignore_eos": True}}, "sampling_params.ignore_eos"),
    ({"text": "a", "sampling_params": [{"ebnf": "a", "json_schema": "{}"}]}, "sampling_params[0].ebnf"),
    ({"text": "a", "top_logprobs_num": 3}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "top_logprobs_num": 101}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len"),
    ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
    ({"text": "a", "return_text_in_logprobs": True}, "return_text_in_logprobs"),
    ({"text": "a", "priority": 2**40}, "priority"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
)


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_done_is_refused_by_the_name_the_client_used(server: Server, body: Any, param: str) -> None:
    answer = server.post("/generate", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_one_bad_prompt_of_a_list_ends_all_of_them(rested: Server, stream: bool) -> None:
    ids: list[list[int]] = [[10, 11, 12]] * 3 + [[10**9]] + [[10, 11, 12]] * 3
    answer = rested.post("/generate", {"input_ids": ids, "sampling_params": LONG, "stream": stream})
    assert '"code":400' in answer.text and '"param":"input_ids"' in answer.text


def test_a_full_queue_refuses_more_and_says_when_to_come_again(rested: Server) -> None:
    answer = rested.post("/generate", {"text": ["a"] * 200, "sampling_params": LONG})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert "--max-queued 64" in answer.json()["error"]["message"]


def test_those_who_watch_the_server_get_what_they_need(server: Server) -> None:
    server.generate({"text": COUNT, "sampling_params": GREEDY})
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ready").json() == {"status": "ready", "model": "SmolLM2-135M-Instruct"}
    info = server.http.get("/server_info").json()
    assert info["settings"]["context"] == 2048 and info["settings"]["weights"] == "gguf"
    text = server.http.get("/metrics").text
    names = (
        *("roost_queued_requests 0.0", "roost_running_requests 0.0", "roost_completion_tokens_total"),
        *("roost_prompt_tokens_total", "roost_cached_tokens_total", "roost_retractions_total"),
        *("roost_time_to_first_token_seconds_bucket", "roost_inter_token_seconds_bucket"),
        *("roost_end_to_end_seconds_count", 'roost_pages{account="free",book="full"}'),
        *('roost_pages{account="cached",book="full"}', 'roost_requests_total{reason="length"}'),
    )
    assert [name for name in names if name not in text] == []


def test_what_speculation_did_is_said_for_each_request_and_for_all(rested: Server) -> None:
    before = rested.stats()["spec"]
    answers = rested.generate({"text": [COUNT, "The sky is"], "sampling_params": {**GREEDY, "n": 2}})
    wait_until(rested.is_at_rest)
    after, text = rested.stats()["spec"], rested.http.get("/metrics").text
    for key, name in (("drafts_offered", "spec_num_proposed_drafts"), ("drafts_accepted", "spec_num_correct_drafts")):
        assert sum(answer["meta_info"].get(name, 0) for answer in answers) == after[key] - before[key]
        assert f"roost_spec_{key}_total {float(after[key])}\n" in text
    assert sum(after["histogram"]) == after["rounds"]
    assert after["accept_length"] * after["rounds"] == pytest.approx(after["rounds"] + after["drafts_accepted"])
    assert f"roost_spec_accept_length_count {float(after['rounds'])}\n" in text


def test_bench_measures_this_server_and_reads_its_sums(rested: Server, tmp_path: Path) -> None:
    place = tmp_path / "out.json"
    flags = ("--requests", "2", "--new-tokens", "4", "--concurrency", "2", "--json", str(place))
    assert main(["bench", "--url", rested.url, *flags]) == 0
    (run,) = json.loads(place.read_text())
    assert run["output_tokens_s"] * run["wall_s"] == pytest.approx(2 * 4)
    assert len(run["spec"]["histogram"]) == len(rested.stats()["spec"]["histogram"])
    assert run["spec"]["rounds"] == sum(run["spec"]["histogram"])
