"""OpenAI's official client against a real server with the real default model."""

import inspect
import math
import threading
from typing import Any

import openai
import pytest
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions

from roost.server.schema import ChatBody, CompletionBody
from tests.support.server_process import Server

MODEL = "SmolLM2-135M-Instruct"
FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Tell me a story about an owl."}]


def test_the_capital_of_france_is_paris(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.role == "assistant"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_gives_the_same_text_and_its_usage_last(client: openai.OpenAI) -> None:
    asked: Any = {"model": "default", "messages": FRANCE, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    plain = list(client.chat.completions.create(**asked, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)


def test_a_repeated_prompt_is_found_in_the_cache(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Count: " + "one two three " * 30}]}
    first, second = (client.chat.completions.create(**asked, max_tokens=2).usage for _ in range(2))
    assert first is not None and first.prompt_tokens_details is not None
    assert second is not None and second.prompt_tokens_details is not None
    cached = second.prompt_tokens_details.cached_tokens or 0
    assert (first.prompt_tokens_details.cached_tokens or 0) < cached <= second.prompt_tokens
    assert cached > second.prompt_tokens - 32


def test_log_probabilities_are_some_sorted_and_of_the_chosen_token(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 5}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert answer.usage is not None and len(content) == answer.usage.completion_tokens
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 5
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-4
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    said = b"".join(bytes(entry.bytes or []) for entry in content[:-1]).decode()
    assert said == answer.choices[0].message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_several_outputs_come_with_their_index_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": STORY, "n": 3, "seed": 5, "max_tokens": 12}
    whole = client.chat.completions.create(**asked)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    assert whole.usage is not None and whole.usage.completion_tokens == 36
    streamed = {0: "", 1: "", 2: ""}
    ends = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
    assert streamed == texts
    assert sorted(ends) == [0, 1, 2]


def test_the_same_seed_gives_the_same_text_also_beside_others(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": STORY, "seed": 11, "temperature": 1.2, "max_tokens": 24}

    def ask(**changes: Any) -> str | None:
        return client.chat.completions.create(**{**asked, **changes}).choices[0].message.content

    alone = ask()
    others = [threading.Thread(target=ask, kwargs={"seed": seed, "max_tokens": 40}) for seed in range(4)]
    for other in others:
        other.start()
    assert ask() == alone
    for other in others:
        other.join()
    assert ask(seed=12) != alone
    assert ask(seed=-11) is not None


def test_a_stop_string_cuts_the_output_streamed_or_not(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0, "stop": [" Par", "never"]}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == "The capital of France is"
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of France is"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_of_tokens_ends_the_output(client: openai.OpenAI, name: str) -> None:
    limit: Any = {name: 3}
    answer = client.chat.completions.create(model=MODEL, messages=STORY, **limit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_a_conversation_goes_on_with_what_the_client_got(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    back = first.choices[0].message
    question = {"role": "user", "content": "And of Italy?"}
    for told in (back, back.model_dump()):
        messages: Any = [{"role": "system", "content": "Be brief."}, *FRANCE, told, question]
        assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4).choices[0].message.content


def test_a_special_token_that_a_user_spells_stays_text(client: openai.OpenAI) -> None:
    spelt: Any = [{"role": "user", "content": "<|im_end|>"}]
    plain: Any = [{"role": "user", "content": ""}]
    usages = [client.chat.completions.create(model=MODEL, messages=m, max_tokens=1).usage for m in (spelt, plain)]
    assert usages[0] is not None and usages[1] is not None
    assert usages[0].prompt_tokens > usages[1].prompt_tokens + 3


def test_text_completions_streamed_or_not_one_or_several(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["The sky is", "One, two, three,"], "temperature": 0, "max_tokens": 6}
    whole = client.completions.create(**asked)
    texts = {choice.index: choice.text for choice in whole.choices}
    assert "four" in texts[1]
    assert whole.usage is not None and whole.usage.completion_tokens == 12
    streamed = {0: "", 1: ""}
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks[:-1]:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts
    assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None


def test_echo_and_log_probabilities_of_a_text_completion_cover_the_prompt(client: openai.OpenAI) -> None:
    prompt = "One, two, three,"
    asked: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 2, "echo": True, "logprobs": 2}
    answer = client.completions.create(**asked, n=2)
    for choice in answer.choices:
        assert choice.text.startswith(prompt)
        logprobs = choice.logprobs
        assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
        assert "".join(logprobs.tokens) == choice.text
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
        assert logprobs.token_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in logprobs.token_logprobs[1:])
        assert [choice.text[at:][: len(t)] for at, t in zip(logprobs.text_offset, logprobs.tokens, strict=True)] == (
            logprobs.tokens
        )
    pieces = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(piece.text for piece in pieces) == answer.choices[0].text
    tokens = [token for piece in pieces if piece.logprobs for token in piece.logprobs.tokens or []]
    offsets = [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset or []]
    assert answer.choices[0].logprobs is not None
    assert tokens == answer.choices[0].logprobs.tokens
    assert offsets == answer.choices[0].logprobs.text_offset


def test_models_are_listed_by_the_name_they_answer_to(client: openai.OpenAI) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.to_dict()["max_model_len"], listed.to_dict()["root"]) == (MODEL, 2048, MODEL)
    assert client.models.retrieve(MODEL).id == client.models.retrieve("default").id == MODEL


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'") as caught:
        client.chat.completions.create(model="gpt-5", messages=FRANCE)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


REFUSED: tuple[tuple[str, Any], ...] = (
    ("stop", ["x"] * 65),
    ("temperature", -1),
    ("n", 0),
    ("max_tokens", -1),
    ("top_logprobs", 3),
    ("logit_bias", {"x": 1}),
    ("stream_options", {"include_usage": True}),
    ("reasoning_effort", "low"),
    ("store", True),
    ("service_tier", "priority"),
    ("verbosity", "high"),
    ("prompt_cache_retention", "24h"),
    ("prompt_cache_options", {"ttl": "30m"}),
    ("moderation", {"model": "omni"}),
    ("metadata", {str(key): "x" for key in range(17)}),
)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(client: openai.OpenAI, name: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=FRANCE, **{name: value})
    assert caught.value.param == name
    assert caught.value.code is None, "a word of OpenAI's, or nothing: never the status"


def test_every_parameter_of_the_official_client_is_known_here() -> None:
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for kind, method in ((ChatBody, Completions.create), (CompletionBody, TextCompletions.create)):
        asked = set(inspect.signature(method).parameters) - own
        assert asked <= set(kind.__struct_fields__)


def test_what_would_happen_anyway_may_be_said(client: openai.OpenAI, server: Server) -> None:
    harmless: Any = {
        **{"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "store": False},
        **{"prompt_cache_key": "k", "safety_identifier": "s", "user": "u", "metadata": {"run": "7"}},
        **{"service_tier": "auto", "parallel_tool_calls": False, "verbosity": "medium", "modalities": ["text"]},
        **{"prompt_cache_retention": "in_memory", "prompt_cache_options": {"mode": "implicit"}},
        **{"max_tokens": 1, "max_completion_tokens": 1, "top_logprobs": 0, "logprobs": False},
    }
    answer = client.chat.completions.create(model=MODEL, messages=FRANCE, **harmless)
    assert answer.service_tier == "default", "who asks for one is told which it was"
    options: Any = {"include_usage": True, "include_obfuscation": False}
    harmless |= {"stream": True, "stream_options": options}
    assert list(client.chat.completions.create(model=MODEL, messages=FRANCE, **harmless))[-1].usage
    server.close_sessions()  # the key's


def test_a_top_p_of_0_takes_the_best_token_and_a_top_k_of_0_all(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": STORY, "max_tokens": 8, "seed": 3}

    def text(**more: Any) -> str | None:
        return client.chat.completions.create(**asked, **more).choices[0].message.content

    assert text(top_p=0, temperature=1.5) == text(temperature=0)
    assert text(top_p=0, temperature=1.5, extra_body={"top_k": 5}) == text(temperature=0)
    assert text(temperature=1.5, extra_body={"top_k": 0}) == text(temperature=1.5, extra_body={"top_k": -1})
    assert text(temperature=1.5) != text(temperature=0)
    with pytest.raises(openai.BadRequestError) as caught:
        text(top_p=0, extra_body={"top_k": -2})
    assert caught.value.param == "top_k"


def test_a_prompt_that_is_too_long_is_refused_by_name(client: openai.OpenAI, server: Server) -> None:
    long: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.APIStatusError, match="--context 2048") as caught:
        client.chat.completions.create(model=MODEL, messages=long)
    assert (caught.value.status_code, caught.value.param) == (400, "messages")
    assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")
    assert "maximum context length is 2048 tokens" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as caught:
        client.completions.create(model=MODEL, prompt="one", max_tokens=2048)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "--context 2048" in caught.value.message
    assert server.post("/generate", {"text": "word " * 3000}).status_code == 413, "elsewhere it is as it was"


def test_a_timeout_of_the_request_is_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        extra = {"timeout": 0.05, "ignore_eos": True}
        client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=1000, extra_body=extra)
    assert caught.value.status_code == 504
