"""The default model under schemas and tools says the same with and without drafts, and it is valid, whoever is asked.

In the form that it is served in: the CPU's kernels and the file's own weights, where a text does not depend on how it
was drafted.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import jsonschema_rs
import pytest

from roost import LLM, EngineConfig, Options, SchedConfig, SpecConfig
from roost.config.options import MemoryConfig, ModelConfig

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["Oslo", "Rome", "Lima"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
RECORDS = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "due": {"type": "string", "format": "date"},
            "done": {"type": "boolean"},
        },
        "required": ["id", "due", "done"],
        "additionalProperties": False,
    },
}
EITHER = {
    "anyOf": [
        {"type": "object", "properties": {"error": {"type": "string", "maxLength": 20}}, "required": ["error"]}
        | {"additionalProperties": False},
        {"$ref": "#/$defs/point"},
    ],
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"type": "number"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[dict[str, Any]] = [PERSON, RECORDS, EITHER]
ASKED = [{"role": "user", "content": "Anna, 31, lives in Rome and has three errands. Write that down as JSON."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SPECS = {
    "n-gram": SpecConfig(spec="ngram", spec_steps=3),
    "chain": SpecConfig(spec="eagle3", spec_steps=3),
    "auto": SpecConfig(),
    "tree": SpecConfig(spec="eagle3", spec_steps=3, spec_topk=3, spec_tokens=8),
}
OPTIONS = [Options(temperature=0, max_new_tokens=96), Options(temperature=0.8, seed=7, max_new_tokens=96)]


def serving(spec: SpecConfig, *, depth: int) -> LLM:
    """An engine with the default model."""
    return LLM(
        config=EngineConfig(
            model=ModelConfig(threads=1),
            memory=MemoryConfig(pool_tokens=4096, strict_memory=2),
            sched=SchedConfig(context=1024, overlap=depth == 1),
            spec=spec,
        )
    )


def answers(llm: LLM) -> list[tuple[str, str]]:
    """What comes of every schema, greedy and drawn, and of tools; with the reason why it ended."""
    said = []
    for options in OPTIONS:
        for schema in SCHEMAS:
            (choice,) = llm.chat(ASKED, options, schema=schema).choices
            said.append((choice.text, choice.finish_reason))
        for wanted in ("auto", "required"):
            (choice,) = llm.chat(ASKED, options, tools=[ADD], tool_choice=wanted).choices
            said.append((choice.text, choice.finish_reason))
    return said


@cache
def plain_answers() -> list[tuple[str, str]]:
    """The same without drafts."""
    with serving(SpecConfig(spec="none"), depth=0) as llm:
        return answers(llm)


def test_what_stops_is_valid_for_both_validators() -> None:
    said = plain_answers()
    each = len(SCHEMAS) + 2
    stopped = 0
    for number, (text, reason) in enumerate(said):
        if number % each < len(SCHEMAS) and reason == "stop":
            stopped += 1
            jsonschema.validate(json.loads(text), SCHEMAS[number % each])
            jsonschema_rs.validate(SCHEMAS[number % each], json.loads(text))
    assert stopped >= 4


@pytest.fixture(
    params=[
        pytest.param(("n-gram", 1), marks=pytest.mark.full),
        ("chain", 0),
        ("auto", 1),
        pytest.param(("tree", 1), marks=pytest.mark.full),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def drafting(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine that drafts."""
    name, depth = request.param
    with serving(SPECS[name], depth=depth) as llm:
        yield llm


def test_drafts_change_nothing_under_a_grammar(drafting: LLM) -> None:
    assert answers(drafting) == plain_answers()
    stats = drafting.stats().spec
    assert stats.drafts_forced > 0 and stats.drafts_accepted >= stats.drafts_forced
