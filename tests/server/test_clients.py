"""Bodies as other people's clients send them, whole: benchmark clients, SDKs, trainers; and what they read of answers.

Each has every field that its client sends unasked. A field that asks for something is in the tests of its endpoint.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from roost.sched.intake import PRIORITY_MAX
from tests.server.test_ends import in_background
from tests.server.test_native import COUNT, GREEDY, LONG, ids_of
from tests.support.server_process import Server, Stream, wait_until
from tests.support.tiny_folder import ENDLESS

HELLO = [{"role": "user", "content": "Hello"}]
SGLANG_SAMPLING = {
    **{"max_new_tokens": 4, "min_new_tokens": 0, "n": 1, "stop": [], "stop_token_ids": None, "stop_regex": None},
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 1 << 30, "min_p": 0.0, "frequency_penalty": 0.0},
    **{"presence_penalty": 0.0, "repetition_penalty": 1.0, "ignore_eos": False, "regex": None, "json_schema": None},
    **{"ebnf": None, "structural_tag": None, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"no_stop_trim": False, "custom_params": None, "stream_interval": None, "logit_bias": None},
    **{"sampling_seed": None},
}
SGLANG_GENERATE = {
    **{"text": COUNT, "input_ids": None, "input_embeds": None, "image_data": None, "video_data": None},
    **{"audio_data": None, "sampling_params": SGLANG_SAMPLING, "rid": None, "return_logprob": None},
    **{"logprob_start_len": None, "top_logprobs_num": None, "token_ids_logprob": None, "stream": False},
    **{"return_text_in_logprobs": False, "log_metrics": True, "return_hidden_states": False, "modalities": None},
    **{"return_routed_experts": False, "routed_experts_start_len": 0, "session_params": None, "lora_path": None},
    **{"lora_id": None, "custom_logit_processor": None, "bootstrap_host": None, "bootstrap_port": None},
    **{"bootstrap_room": None, "bootstrap_pair_key": None, "decode_tp_size": None, "require_reasoning": False},
    **{"routed_dp_rank": None, "disagg_prefill_dp_rank": None, "data_parallel_rank": None, "background": False},
    **{"conversation_id": None, "priority": None, "extra_key": None, "routing_key": None, "no_logs": False},
    **{"custom_labels": None, "return_bytes": False, "return_entropy": False, "external_trace_header": None},
    **{"received_time": None, "need_wait_for_mm_inputs": None, "num_items_assigned": None},
    **{"max_dynamic_patch": None, "min_dynamic_patch": None},
}
VLLM_COMMON = {
    **{"model": None, "frequency_penalty": None, "logit_bias": None, "n": 1, "presence_penalty": None, "seed": None},
    **{"stop": [], "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None},
    **{"use_beam_search": False, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0},
    **{"stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0},
    **{"skip_special_tokens": True, "spaces_between_special_tokens": True, "truncate_prompt_tokens": None},
    **{"truncation_side": None, "prompt_logprobs": None, "logprob_token_ids": None, "allowed_token_ids": None},
    **{"bad_words": [], "response_format": None, "structured_outputs": None, "priority": 0},
    **{"return_tokens_as_token_ids": None, "return_token_ids": None, "routed_experts_prompt_start": 0},
    **{"return_token_offsets": False, "return_mm_kwargs": True, "cache_salt": None, "kv_transfer_params": None},
    **{"ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None, "stream_interval": None},
    **{"thinking_token_budget": None, "watermarking": None, "session_id": None},
}
SGLANG_COMMON = {
    **{"model": "default", "frequency_penalty": 0.0, "logit_bias": None, "n": 1, "presence_penalty": 0.0},
    **{"seed": None, "stop": None, "stream": False, "stream_options": None, "user": None, "top_k": -1, "min_p": 0.0},
    **{"return_hidden_states": False, "return_routed_experts": False, "routed_experts_start_len": 0},
    **{"return_cached_tokens_details": False, "return_token_ids": False, "min_tokens": 0, "regex": None},
    **{"ebnf": None, "repetition_penalty": 1.0, "stop_token_ids": None, "stop_regex": None, "no_stop_trim": False},
    **{"ignore_eos": False, "skip_special_tokens": True, "lora_path": None, "session_params": None},
    **{"custom_params": None, "custom_logit_processor": None, "images_config": None, "bootstrap_host": None},
    **{"bootstrap_port": None, "bootstrap_room": None, "routed_dp_rank": None, "disagg_prefill_dp_rank": None},
    **{"data_parallel_rank": None, "rid": None, "extra_key": None, "cache_salt": None, "ngram_corpus_id": None},
    **{"priority": None},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "SGLang's bench_serving, native": (
        "/generate",
        {
            **{"text": COUNT, "sampling_params": {**GREEDY, "ignore_eos": True}, "stream": True, "lora_path": None},
            **{"return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1},
        },
    ),
    "SGLang's bench_serving, completions": (
        "/v1/completions",
        {
            **{"model": "default", "prompt": COUNT, "temperature": 0.0, "best_of": 1, "max_tokens": 4},
            **{"stream": True, "ignore_eos": True},
        },
    ),
    "SGLang's GenerateReqInput, every default": ("/generate", SGLANG_GENERATE),
    "SGLang's SDK, select": (
        "/generate",
        {
            **{"text": [COUNT, "One"], "sampling_params": {"max_new_tokens": 0, "temperature": 0}},
            **{"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 0},
        },
    ),
    "sampling_params, all null but the length": (
        "/generate",
        {"text": COUNT, "sampling_params": {**dict.fromkeys(SGLANG_SAMPLING), "max_new_tokens": 2}},
    ),
    "a trainer's rollout": (
        "/generate",
        {
            **{"input_ids": [504, 3145], "sampling_params": {"top_k": -1, "top_p": 1.0, "max_new_tokens": 2}},
            **{"return_logprob": True, "return_routed_experts": False, "return_indexer_topk": False},
        },
    ),
    "SGLang's ChatCompletionRequest, every default": (
        "/v1/chat/completions",
        {
            **SGLANG_COMMON,
            **{"messages": HELLO, "logprobs": False, "top_logprobs": None, "max_tokens": 2, "response_format": None},
            **{"max_completion_tokens": None, "temperature": None, "top_p": None, "tools": None},
            **{"tool_choice": "none", "parallel_tool_calls": True, "return_prompt_token_ids": False},
            **{"return_meta_info": False, "reasoning_effort": None, "task": None, "continue_final_message": False},
            **{"separate_reasoning": True, "stream_reasoning": True, "chat_template_kwargs": None, "input_ids": None},
            **{"max_dynamic_patch": None, "min_dynamic_patch": None, "use_audio_in_video": False},
        },
    ),
    "SGLang's CompletionRequest, every default": (
        "/v1/completions",
        {
            **SGLANG_COMMON,
            **{"prompt": COUNT, "best_of": None, "echo": False, "logprobs": None, "max_tokens": 2, "suffix": None},
            **{"temperature": 1.0, "top_p": 1.0, "json_schema": None, "custom_labels": None},
        },
    ),
    "vLLM's benchmark, completions": (
        "/v1/completions",
        {
            **{"model": "default", "prompt": COUNT, "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None},
            **{"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
            **{"temperature": 0.0, "top_k": 0, "top_p": 1.0},
        },
    ),
    "vLLM's benchmark, chat": (
        "/v1/chat/completions",
        {
            **{"model": "default", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
            **{"max_completion_tokens": 4, "stream": True, "ignore_eos": True},
            **{"stream_options": {"include_usage": True, "continuous_usage_stats": False}},
        },
    ),
    "vLLM's ChatCompletionRequest, every default": (
        "/v1/chat/completions",
        {
            **VLLM_COMMON,
            **{"messages": HELLO, "logprobs": False, "top_logprobs": 0, "max_tokens": None, "reasoning_effort": None},
            **{"max_completion_tokens": 2, "tools": None, "tool_choice": "none", "include_reasoning": True},
            **{"parallel_tool_calls": True, "echo": False, "add_generation_prompt": True, "chat_template": None},
            **{"continue_final_message": False, "add_special_tokens": False, "documents": None},
            **{"chat_template_kwargs": None, "media_io_kwargs": None, "mm_processor_kwargs": None},
            **{"return_prompt_text": None},
        },
    ),
    "vLLM's CompletionRequest, every default": (
        "/v1/completions",
        {
            **VLLM_COMMON,
            **{"prompt": COUNT, "echo": False, "logprobs": None, "max_tokens": 2, "suffix": None},
            **{"prompt_embeds": None, "add_special_tokens": True},
        },
    ),
    "SGLang's flush of the SDK": ("/flush_cache", {"empty_cache": True}),
}


@pytest.mark.parametrize("client", BODIES)
def test_what_a_client_sends_unasked_is_accepted(rested: Server, client: str) -> None:
    path, body = BODIES[client]
    answer = rested.post(path, body)
    assert answer.status_code == 200, answer.text
    assert "error" not in answer.text


@pytest.mark.parametrize("client", [name for name in BODIES if name.endswith("every default")])
def test_the_same_fields_are_refused_by_name_when_they_ask_for_something(server: Server, client: str) -> None:
    path, body = BODIES[client]
    done = {"ignore_eos", "stream", "echo", "no_stop_trim", "include_stop_str_in_output", "return_logprob"}
    same = {"parallel_tool_calls", "spaces_between_special_tokens", "return_mm_kwargs", "skip_special_tokens"}
    done |= {"logprobs"}
    same |= {"separate_reasoning", "stream_reasoning", "return_text_in_logprobs"}
    flags = [name for name, value in body.items() if isinstance(value, bool) and name not in done | same]
    assert flags
    for name in flags:
        answer = server.post(path, {**body, name: not body[name]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), answer.text


def test_stops_stay_in_the_text_where_that_is_asked_for(server: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 9, "stop": " five"}
    for name in ("no_stop_trim", "include_stop_str_in_output"):
        (choice,) = client.completions.create(**asked, extra_body={name: True}).choices
        assert choice.text.endswith(" five") and choice.finish_reason == "stop"
    assert not client.completions.create(**asked).choices[0].text.endswith(" five")


def test_a_request_of_openais_endpoints_has_the_name_it_was_given(rested: Server, client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "messages": HELLO, "max_tokens": 1}
    assert client.chat.completions.create(**asked, extra_body={"rid": "owl"}).id == "owl"
    assert client.chat.completions.create(**asked, extra_body={"request_id": "owl"}).id == "chatcmpl-owl"
    running = Stream(rested, "/generate", {"text": COUNT, "sampling_params": LONG, "rid": "taken", "stream": True})
    running.next()
    with pytest.raises(openai.ConflictError) as caught:
        client.chat.completions.create(**asked, extra_body={"rid": "taken"})
    assert caught.value.param == "rid"
    running.close()


@pytest.mark.parametrize("body", [{"rid": "", "abort_all": True}, {"abort_all": True}, {"rid": "x", "abort_all": True}])
def test_everything_is_aborted_as_sglangs_clients_ask_for_it(rested: Server, body: dict[str, Any]) -> None:
    whole = in_background(lambda: rested.generate({"text": [COUNT] * 3, "sampling_params": LONG}))
    wait_until(lambda: rested.stats()["running"] == 3)
    assert rested.post("/abort_request", body).status_code == 200
    assert [each["meta_info"]["finish_reason"]["type"] for each in whole()] == ["abort"] * 3


@pytest.mark.parametrize("body", [{}, {"rid": ""}, {"rid": None, "abort_all": False}])
def test_an_abort_of_nothing_in_particular_is_refused(server: Server, body: dict[str, Any]) -> None:
    answer = server.post("/abort_request", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")


def test_an_aborted_completion_is_an_error_and_no_finish_reason_of_its_own(
    rested: Server, client: openai.OpenAI
) -> None:
    asked: Any = {"model": "default", "messages": HELLO, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    def error_of_whole() -> Any:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**asked)
        return caught.value

    whole = in_background(error_of_whole)
    chunks = iter(client.chat.completions.create(**asked, stream=True))
    next(chunks)
    wait_until(lambda: rested.stats()["running"] == 2)
    rested.post("/abort_request", {"abort_all": True})
    assert (whole().status_code, whole().code) == (499, "request_aborted")
    with pytest.raises(openai.APIError, match="aborted before its output was complete") as caught:
        list(chunks)
    assert caught.value.code == "request_aborted"


def test_tokens_are_those_of_the_completion_and_their_text_comes_back(server: Server) -> None:
    text = "One, two, 三 🦉"
    told = server.post("/tokenize", {"prompt": text, "return_token_strs": True, "model": "default"}).json()
    assert told["tokens"] == ids_of(server, text)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 2048)
    assert len(told["token_strs"]) == told["count"] and told["token_strs"][0] == "One"
    assert server.post("/detokenize", {"tokens": told["tokens"]}).json()["prompt"] == text
    chat = server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    usage = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}).json()["usage"]
    assert len(chat) == usage["prompt_tokens"]
    closed = server.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()["tokens"]
    assert chat[: len(closed)] == closed and len(closed) < len(chat)
    shown = server.post("/detokenize", {"tokens": closed}).json()["prompt"]
    assert "<|im_start|>user\nHello<|im_end|>" in shown
    hidden = server.post("/detokenize", {"tokens": closed, "skip_special_tokens": True}).json()["text"]
    assert "user\nHello" in hidden and "<|im" not in hidden


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/tokenize", {}, (400, "prompt")),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, (400, "prompt")),
        ("/tokenize", {"prompt": "a", "model": "other"}, (404, "model")),
        ("/tokenize", {"prompt": "word " * 3000}, (413, "prompt")),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, (400, "add_special_tokens")),
        ("/tokenize", {"messages": HELLO, "chat_template": "{{ 1 }}"}, (400, "chat_template")),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, (400, "add_generation_prompt")),
        ("/detokenize", {"tokens": [-1]}, (400, "tokens")),
        ("/detokenize", {"tokens": [49152]}, (400, "tokens")),
        ("/detokenize", {"tokens": [1] * 2049}, (413, "tokens")),
    ],
)
def test_what_cannot_be_tokenised_is_refused_by_name(
    server: Server, path: str, body: Any, told: tuple[int, str]
) -> None:
    answer = server.post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == told


def test_those_who_look_before_they_ask_find_what_they_look_for(rested: Server) -> None:
    before = rested.stats()["completion_tokens"]
    assert rested.http.get("/health_generate").json() == {"status": "ok"}
    assert rested.stats()["completion_tokens"] == before + 1, "it does generate"
    assert set(rested.http.get("/version").json()) == {"version"}
    for path in ("/get_model_info", "/model_info"):
        model = rested.http.get(path).json()
        assert (model["model_path"], model["is_generation"]) == ("SmolLM2-135M-Instruct", True)
        assert (model["max_model_len"], model["has_chat_template"]) == (2048, True)
    rested.generate({"text": COUNT, "sampling_params": GREEDY})
    for path in ("/get_server_info", "/server_info"):
        info = rested.http.get(path).json()
        assert (info["context_length"], info["max_running_requests"], info["page_size"]) == (2048, 8, 16)
        assert info["internal_states"][0]["avg_spec_accept_length"] == info["stats"]["spec"]["accept_length"]
    assert rested.http.get("/openapi.json").json()["openapi"] == "3.1.0"


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server whose model has other names, and that runs one request at a time."""
    flags = ("--served-model-name", "owl,night/owl", "--served-model-name", "bird", "--model", str(tiny_model))
    limits = ("--threads", "1", "--pool-tokens", "16384", "--max-running", "1", "--max-queued", "1")
    started = Server(tmp_path_factory.mktemp("named"), *flags, *limits, "--health-step-s", "1")
    try:
        yield started
        started.check_rest()
    finally:
        started.kill()


def test_a_model_answers_to_the_names_it_is_given(named: Server, tiny_model: Path) -> None:
    client = openai.OpenAI(base_url=f"{named.url}/v1", api_key="none", max_retries=0)
    (listed,) = client.models.list()
    assert (listed.id, listed.to_dict()["root"]) == ("owl", tiny_model.name)
    for name in ("owl", "night/owl", "bird", "default"):
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == "owl"
        assert client.models.retrieve(name).id == "owl"
    with pytest.raises(openai.NotFoundError, match="this server has 'owl'"):
        client.completions.create(model=tiny_model.name, prompt="a")


def test_an_engine_that_generates_nothing_for_the_asker_is_not_healthy(named: Server) -> None:
    before_all = {"text": "a", "sampling_params": ENDLESS, "priority": PRIORITY_MAX, "stream": True}
    stream = Stream(named, "/generate", before_all)
    stream.next()
    answer = named.http.get("/health_generate")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"].startswith("no token was generated")
    stream.close()
    wait_until(lambda: named.http.get("/health_generate").status_code == 200)


def test_an_engine_whose_queue_is_full_is_healthy_while_it_generates_for_others(named: Server) -> None:
    body = {"text": "a", "sampling_params": ENDLESS, "stream": True}
    first = Stream(named, "/generate", body)
    first.next()
    second = in_background(lambda: named.post("/generate", {**body, "stream": False}))
    wait_until(lambda: named.stats()["queued"] == 1)
    assert named.http.get("/health_generate").json() == {"status": "ok"}
    assert named.post("/abort_request", {"abort_all": True}).status_code == 200
    assert second().status_code == 200
    first.close()
