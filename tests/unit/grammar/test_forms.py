"""What a request may say of its output becomes a grammar that allows just that."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from roost.errors import RequestError
from roost.grammar.build import GRAMMAR_BYTES_MAX
from roost.grammar.forms import (
    CHOICES_MAX,
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from roost.tools.definitions import DEPTH_MAX
from tests.unit.tools.test_grammars import allows as allowed


def allows(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text as a whole output."""
    return allowed(grammar, text, has_markers=False)


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int | None = None


@pytest.mark.parametrize("schema", [Person, Person.model_json_schema(), json.dumps(Person.model_json_schema())])
def test_a_schema_may_be_a_dict_a_text_or_a_pydantic_model(schema: Any) -> None:
    grammar = json_schema_grammar(schema)
    assert allows(grammar, '{"name": "Ann", "age": 3}') and allows(grammar, '{"name": "Ann"}')
    assert not allows(grammar, '{"age": 3}') and not allows(grammar, '{"name": 3}')


class Nested(BaseModel):
    """With models inside, and one that takes any field."""

    class Open(BaseModel):
        """Takes others."""

        model_config = ConfigDict(extra="allow")
        properties: int

    people: list[Person]
    more: Open
    counts: dict[str, int]


def test_a_pydantic_model_has_the_fields_that_it_reads_and_no_others() -> None:
    grammar = json_schema_grammar(Nested)
    more = '{"people": [{"name": "A"%s}], "more": {"properties": 1%s}, "counts": {"x": 1}%s}'
    assert allows(grammar, more % ("", "", "")) and allows(grammar, more % ("", ', "y": 2', ""))
    assert not allows(grammar, more % (', "y": 2', "", "")) and not allows(grammar, more % ("", "", ', "y": 2'))


def test_whitespace_of_json_is_as_json_dumps_writes_it() -> None:
    for grammar in (json_object_grammar(), json_schema_grammar({"type": "object"})):
        assert allows(grammar, json.dumps({"a": [1, {"b": None}], "c": "x\ny"}))
        for text in ('{ "a": 1}', '{"a":1}', '{"a": 1,"b": 2}', '{"a": 1}\n', "[]", ""):
            assert not allows(grammar, text), text


def test_a_boolean_is_a_schema() -> None:
    assert allows(json_schema_grammar(True), "[1, {}]")
    assert "not" in json_schema_grammar(False)


@pytest.mark.parametrize("given", ["{", "5", "[]", 5, None, [], "[" * 100_000])
def test_what_is_no_schema_is_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="grammar: must be a JSON schema"):
        json_schema_grammar(given)


def test_a_schema_may_be_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        for _ in range(depth - 1):
            schema = {"items": schema}
        return schema

    json_schema_grammar(nested(DEPTH_MAX - 1))
    with pytest.raises(RequestError, match="nested at most"):
        json_schema_grammar(nested(DEPTH_MAX + 1))
    with pytest.raises(RequestError, match="bytes long"):
        json_schema_grammar('"' + "a" * GRAMMAR_BYTES_MAX + '"')


@pytest.mark.parametrize(
    ("pattern", "text", "other"),
    [
        ("a/b", "a/b", "a"),
        (r"a\/b", "a/b", r"a\/b"),
        ("a\nb", "a\nb", "ab"),
        ("a\\\nb", "a\nb", "ab"),
        (r"^\d{2}$", "12", "123"),
        (r"\\n", "\\n", "\n"),
        ("(?i)yes|no", "NO", "maybe"),
        ("é+", "éé", "e"),
    ],
)
def test_a_regular_expression_matches_the_whole_output(pattern: str, text: str, other: str) -> None:
    assert allows(regex_grammar(pattern), text)
    assert not allows(regex_grammar(pattern), other) and not allows(regex_grammar(pattern), text + "?")


def test_an_empty_regular_expression_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 1 character"):
        regex_grammar("")


def test_one_of_some_texts() -> None:
    texts = ["yes", 'no "quotes" / no slashes\n', "yes, but"]
    for text in texts:
        assert allows(choice_grammar(texts), text)
    assert not allows(choice_grammar(texts), "yes,") and not allows(choice_grammar(texts), "")


@pytest.mark.parametrize("given", [[], [""], ["a", ""], [5], ["a"] * (CHOICES_MAX + 1)])
def test_choices_are_some_texts_that_are_not_empty(given: Any) -> None:
    with pytest.raises(RequestError, match=f"must be 1 to {CHOICES_MAX} texts"):
        choice_grammar(given)
    choice_grammar(["a"] * CHOICES_MAX)


def test_what_llguidance_would_let_a_schema_or_a_rule_say_beside_is_refused() -> None:
    with pytest.raises(RequestError, match="x-guidance is not supported"):
        json_schema_grammar({"x-guidance": {"whitespace_flexible": True}})
    with pytest.raises(RequestError, match="temperature is not supported in a rule"):
        ebnf_grammar("start: t\n t[temperature=1.5]: /a/")


def test_what_is_no_text_is_no_schema() -> None:
    with pytest.raises(RequestError, match="must be valid Unicode"):
        json_schema_grammar('{"const": "\\ud800"}')


def test_lark_is_passed_on() -> None:
    made = ebnf_grammar('start: greeting "!"+\ngreeting: "hello" | /[0-9]{2}/  // ::= is not in the way')
    assert allows(made, "hello!!") and allows(made, "12!")
    assert not allows(made, "hello") and not allows(made, "1!")
