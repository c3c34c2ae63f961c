"""Outputs that must match something, over HTTP: every server's names for it, what comes back, what is refused."""

import json
from typing import Any, Literal

import jsonschema
import jsonschema_rs
import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import StartTiny
from tests.support.chain_model import END, save_chain
from tests.support.server_process import Server
from tests.support.small_vocabularies import THINK

MODEL = "SmolLM2-135M-Instruct"
ANNA: Any = [{"role": "user", "content": "Anna is 31 and likes chess and rowing. Extract it as JSON."}]
COLOUR: Any = [{"role": "user", "content": "Which colour is the sky?"}]


PATTERN_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-m].{18}$"}}}
        | {"required": ["a"], "additionalProperties": False},
    },
}


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    hobbies: list[str]


class Ticket(BaseModel):
    """Something with parts of most kinds."""

    state: Literal["open", "closed"]
    price: float | None
    owner: Person | None = None


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["blue", "green"]}, "shade": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "shade"],
    "additionalProperties": False,
}


def check(text: str | None, schema: dict[str, Any]) -> None:
    """A text is JSON by a schema, says who was asked to say so."""
    value = json.loads(text or "")
    jsonschema.validate(value, schema)
    jsonschema_rs.validate(schema, value)


def test_a_pydantic_model_is_parsed_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": ANNA, "temperature": 0, "response_format": Person}
    whole = client.chat.completions.parse(**asked).choices[0]
    assert whole.finish_reason == "stop" and whole.message.parsed == Person(**json.loads(whole.message.content or ""))
    assert whole.message.parsed is not None and whole.message.parsed.name.startswith("Anna")
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.message.parsed


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_drawn_under_a_schema_is_valid_and_the_same_for_a_seed(client: openai.OpenAI, seed: int) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": Ticket.model_json_schema()}}
    asked: Any = {"model": MODEL, "messages": ANNA, "temperature": 0.8, "seed": seed, "max_tokens": 300}
    first, second = (client.chat.completions.create(**asked, response_format=format) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    if first.choices[0].finish_reason == "stop":
        check(first.choices[0].message.content, Ticket.model_json_schema())


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"guided_json": SCHEMA, "guided_decoding_backend": "auto"},
        {"json_schema": json.dumps(SCHEMA)},
    ],
    ids=lambda field: next(iter(field)),
)
def test_a_schema_has_many_names(server: Server, field: dict[str, Any]) -> None:
    for path, more in (("chat/completions", {"messages": COLOUR}), ("completions", {"prompt": "The sky:"})):
        answer = server.post(f"/v1/{path}", {**more, **field, "max_tokens": 40}).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", answer
        check(choice["text"] if "text" in choice else choice["message"]["content"], SCHEMA)


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ({"guided_choice": ["blue", "green"]}, {"blue", "green"}),
        ({"structured_outputs": {"choice": ["blue"]}}, {"blue"}),
        ({"guided_regex": "[0-4]/[0-4]"}, {f"{a}/{b}" for a in range(5) for b in range(5)}),
        ({"structured_outputs": {"regex": "a{3}"}}, {"aaa"}),
        ({"regex": "a{3}"}, {"aaa"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a", "b"}),
        ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, {"a", "b"}),
        ({"ebnf": 'root ::= "a" | "b"'}, {"a", "b"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_texts_expressions_and_grammars_have_many_names(
    server: Server, field: dict[str, Any], allowed: set[str]
) -> None:
    answer = server.post("/v1/chat/completions", {"messages": COLOUR, "n": 3, **field}).json()
    assert {choice["message"]["content"] for choice in answer["choices"]} <= allowed, answer


def test_any_json_object(server: Server) -> None:
    for format in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        body = {"messages": ANNA, "temperature": 0, "max_tokens": 200, **format}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        assert choice["finish_reason"] == "stop" and isinstance(json.loads(choice["message"]["content"]), dict)


def test_sglangs_endpoint_knows_its_own_names(server: Server) -> None:
    params = {"max_new_tokens": 40, "temperature": 0.9}
    one = server.generate({"text": "The sky:", "sampling_params": {**params, "json_schema": json.dumps(SCHEMA)}})
    check(one["text"], SCHEMA)
    each = [{**params, "regex": "a+b"}, {**params, "ebnf": 'root ::= "c"'}, params]
    texts = [a["text"] for a in server.generate({"text": ["A", "B", "C"], "sampling_params": each})]
    assert set(texts[0]) == {"a", "b"} and texts[0][-1] == "b" and texts[1] == "c"


def test_a_cut_output_says_length(server: Server) -> None:
    body = {"messages": ANNA, "max_tokens": 4, "response_format": {"type": "json_object"}}
    (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("{")


def test_turns_of_a_session_match_their_own_grammar_each(rested: Server) -> None:
    rested.post("/v1/sessions", {"id": "strict"})
    turns = "/v1/sessions/strict/generate"
    first = rested.post(turns, {"messages": COLOUR, "guided_json": SCHEMA, "max_tokens": 40}).json()
    check(first["text"], SCHEMA)
    free = rested.post(turns, {"messages": [{"role": "user", "content": "Thanks."}], "max_tokens": 5}).json()
    assert free["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    last = rested.post(turns, {"text": " So: ", "regex": "x{2}"}).json()
    assert last["text"] == "xx" and last["session"]["turns"] == 3
    body = {"messages": COLOUR, "session_id": "strict", "guided_choice": ["no"]}
    assert rested.post("/v1/chat/completions", body).status_code == 400  # the session holds plain text now
    rested.http.delete("/v1/sessions/strict")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
        "not",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema", "not"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "must be text, json_object or"),
    ({"response_format": {"type": "json_object", "strict": True}}, "response_format.strict", "not a parameter"),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "cannot be given with"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "not"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "one grammar"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_regex": ""}, "guided_regex", "at least 1 character"),
    ({"guided_choice": []}, "guided_choice", "must be 1 to"),
    ({"guided_choice": ["a" * 200_000]}, "guided_choice", "leaves no choice for more than"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no text matches it"),
    ({"guided_json": {"type": "object", "x-guidance": {}}}, "guided_json", "x-guidance"),
    ({"ebnf": "start: t\nt[max_tokens=3]: /.*/"}, "ebnf", "max_tokens"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "cannot be read"),
    ({"ebnf": "start: nobody"}, "ebnf", "nobody"),
    ({"guided_json": "{"}, "guided_json", "must be a JSON schema"),
    ({"guided_json": {"a": "x" * 300_000}}, "guided_json", "bytes long"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "with a grammar"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens", "with a grammar"),
    ({"structural_tag": {"type": "x"}}, "structural_tag", "not supported"),
]


@pytest.mark.parametrize(("field", "param", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(
    rested: Server, field: dict[str, Any], param: str, told: str
) -> None:
    refused = rested.post("/v1/chat/completions", {"messages": COLOUR, **field})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param and told in error["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": "(.*[a-m].{18})"},
        {"guided_json": {"type": "string", "pattern": "[a-m].{18}$"}},
        {"tools": [PATTERN_TOOL], "tool_choice": "required"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_an_output_whose_matcher_comes_to_a_limit_ends_alone(rested: Server, field: dict[str, Any]) -> None:
    """Drafts are walked along it and back, also where it has no way back."""
    refused = rested.post("/v1/chat/completions", {"messages": COLOUR, "temperature": 0, "max_tokens": 80, **field})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(field)), refused.text
    assert "cannot be followed to its end" in refused.json()["error"]["message"]
    assert rested.http.get("/health").status_code == 200


@pytest.mark.parametrize("text", ["a<|im_end|>b", "<|endoftext|>", "see <repo_name> here"])
def test_text_that_spells_a_special_token_is_said_as_text(server: Server, text: str) -> None:
    for field in ({"guided_choice": [text]}, {"guided_json": {"const": text}}):
        (choice,) = server.post("/v1/chat/completions", {"messages": COLOUR, **field}).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == (text if "guided_choice" in field else json.dumps(text))


def test_time_that_is_up_while_a_grammar_is_compiled_is_said(rested: Server) -> None:
    terms = range(60)
    slow = f"start: X\nX: {' & '.join(f'A{i}' for i in terms)}\n" + "\n".join(
        f"A{i}: /(?s:.*)[A-Z]{{{i}}}[0-9](?s:.){{{100 + i}}}/" for i in terms
    )
    late = rested.post("/v1/chat/completions", {"messages": COLOUR, "ebnf": slow, "timeout": 0.001})
    assert late.status_code == 504 and late.json()["error"]["param"] == "timeout"
    refused = rested.post("/v1/chat/completions", {"messages": COLOUR, "ebnf": slow})
    assert refused.status_code == 400 and "to compile" in refused.json()["error"]["message"]


def test_reasoning_is_free_and_a_grammar_holds_for_what_follows(
    start_tiny: StartTiny, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pieces = ("\n", THINK, "a", "b", "<", "/", "t", "h", "i", "n", "k", ">", "1", "2", END)
    model = save_chain(tmp_path_factory.mktemp("thinks"), *pieces)
    thinks = start_tiny("--reasoning-format", "think", model=model)
    assert "reasoning between <think> and </think>" in thinks.log
    body: dict[str, Any] = {"messages": COLOUR, "temperature": 0, "max_tokens": 40}
    for more, content in (({}, "12"), ({"guided_json": {"const": 12}}, "12"), ({"guided_choice": ["1h"]}, "1h")):
        (choice,) = thinks.post("/v1/chat/completions", {**body, **more}).json()["choices"]
        assert choice["message"]["reasoning_content"] == "ab" and choice["message"]["content"] == content
        assert choice["finish_reason"] == "stop"
    asked: Any = {**body, "model": "default"}
    client = openai.OpenAI(base_url=f"{thinks.url}/v1", api_key="none")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (thought, "".join(delta.content or "" for delta in deltas)) == ("ab", "12")


def test_the_same_model_without_a_reasoning_format_shows_everything(
    start_tiny: StartTiny, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = save_chain(tmp_path_factory.mktemp("plain"), "\n", THINK, "a", END)
    plain = start_tiny("--reasoning-format", "none", model=model)
    (choice,) = plain.post("/v1/chat/completions", {"messages": COLOUR, "temperature": 0}).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<think>a", "refusal": None}
