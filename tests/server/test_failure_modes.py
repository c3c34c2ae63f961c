"""Failure modes of the serving side that need a whole server; others are beside what they are about."""

import json
import time
from pathlib import Path
from typing import Any

from tests.server.conftest import StartTiny
from tests.support.server_process import Server, Stream
from tests.support.tiny_folder import write_model

IDLE_S = 3
GREEDY = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


def test_31_a_prompt_in_chunks_gives_only_what_follows_its_end(rested: Server) -> None:
    prompt = "".join(f"{number}, " for number in range(1, 100))
    assert rested.post("/flush_cache").status_code == 200
    first = rested.generate({"text": prompt, "sampling_params": GREEDY})
    assert first["meta_info"]["prompt_tokens"] > 2 * 128  # the size of a chunk
    assert first["meta_info"]["cached_tokens"] == 0
    assert len(first["output_ids"]) == 8
    again = rested.generate({"text": prompt, "sampling_params": GREEDY})
    assert again["meta_info"]["cached_tokens"] > 128
    assert again["output_ids"] == first["output_ids"]
    assert "100" in first["text"]


def test_32_characters_of_several_bytes_are_streamed_whole(rested: Server) -> None:
    prompt, params = "🦉日本é🦉日本é🦉日本é🦉日本é🦉日本é", {"temperature": 0, "max_new_tokens": 30}
    whole = rested.generate({"text": prompt, "sampling_params": params})
    assert "🦉" in whole["text"] and "日" in whole["text"]
    events = Stream(rested, "/generate", {"text": prompt, "sampling_params": params, "stream": True}).rest()
    assert events[-1]["text"] == whole["text"]
    # nothing was said that a later token changed: a replacement character stands only where it stands in the end
    assert all(whole["text"].startswith(event["text"]) for event in events)
    shown = {event["text"] for event in events}
    assert len(shown) < len(events[-1]["output_ids"])  # tokens that ended inside of a character showed nothing yet
    asked = {"prompt": prompt, "temperature": 0, "max_tokens": 30, "stream": True}
    pieces = [event["choices"][0]["text"] for event in Stream(rested, "/v1/completions", asked).rest()]
    assert "".join(pieces) == whole["text"]
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_34_an_idle_server_leaves_the_processor_alone(rested: Server) -> None:
    rested.generate({"text": "a", "sampling_params": GREEDY})
    rested.check_rest()
    before = rested.cpu_s()
    time.sleep(IDLE_S)
    assert rested.cpu_s() - before < 0.1 * IDLE_S


EXTREMES: tuple[dict[str, Any], ...] = (
    {"max_new_tokens": 0},
    {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1e-30, "min_p": 1},
    {"temperature": 1e-30, "repetition_penalty": 1e-30, "presence_penalty": -2, "frequency_penalty": -2},
    {"repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": 2, "temperature": 0},
    {"logit_bias": {str(token): -100 for token in range(1024)}},
    {"logit_bias": {"49151": 100}, "ignore_eos": True},
    {"stop": ["x" * 1024] * 64, "stop_token_ids": list(range(1024))},
    {"n": 64, "max_new_tokens": 1},
    {"min_new_tokens": 4, "max_new_tokens": 4, "stop": ["a", "e", " "]},
    {"seed": 2**63 - 1},
    {"seed": -(2**63) + 1},
    {"timeout": 0.001},
)


def test_35_no_request_ends_the_engine_for_the_others(rested: Server) -> None:
    other = Stream(rested, "/generate", {"text": "a", "sampling_params": LONG, "stream": True})
    for params in EXTREMES:
        body = {"text": "hello", "sampling_params": {"max_new_tokens": 4, **params}, "return_logprob": True}
        answer = rested.post("/generate", {**body, "top_logprobs_num": 100, "logprob_start_len": 0})
        assert answer.status_code in (200, 504), (params, answer.text)
    assert other.next()["meta_info"]["finish_reason"] is None
    assert Path(f"/proc/{rested.engine_pid}").exists()
    other.close()


def test_36_refused_input_is_answered_in_every_form(rested: Server) -> None:
    long = "word " * 4000
    for stream in (False, True):
        for body in ({"text": long}, {"text": ["a", long]}, {"input_ids": [5] * 5000}, {"input_ids": [[5] * 2048]}):
            answer = rested.post("/generate", {**body, "stream": stream})
            assert answer.status_code == 413, answer.text
            assert answer.json()["error"]["param"] == ("text" if "text" in body else "input_ids")
        body = {"prompt": long, "stream": stream}
        assert rested.post("/v1/completions", body).json()["error"]["param"] == "prompt"
        body = {"messages": [{"role": "user", "content": long}], "stream": stream}
        assert rested.post("/v1/chat/completions", body).json()["error"]["param"] == "messages"
        body = {"text": "a", "stream": stream, "rid": "\ud800"}  # no text at all; it could not be passed on
        headers = {"content-type": "application/json"}
        answer = rested.http.post("/generate", content=json.dumps(body), headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "rid")


HOSTILE = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({}) }}{{ messages }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 99999 }}{% endfor %}{% endfor %}",
)


def test_38_a_models_template_reaches_nothing(start_tiny: StartTiny, tmp_path: Path) -> None:
    choices = "".join(f"{{% if messages[0].content == '{i}' %}}{text}{{% endif %}}" for i, text in enumerate(HOSTILE))
    server = start_tiny(model=write_model(tmp_path, template=choices))
    for number in range(len(HOSTILE)):
        answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": str(number)}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), answer.text
        assert "class" not in answer.text
    assert server.generate({"text": "a", "sampling_params": {"max_new_tokens": 1}})["output_ids"]
    server.check_rest()
    assert server.stop() == 0
