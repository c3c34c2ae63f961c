"""Tools, schemas and grammars in the library: what a call asks for, what comes back, what is refused by name."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from roost import LLM, Options
from roost.errors import ConfigError, RequestError
from roost.front.answer import Piece
from roost.grammar.forms import choice_grammar
from roost.tools.events import CallArguments, CallClosed, CallOpened
from tests.support.chain_model import END, save_chain
from tests.support.small_vocabularies import THINK

ASKED = [{"role": "user", "content": "hi"}]
OPTIONS = Options(temperature=0, max_new_tokens=200)
FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"what": {"enum": ["owls"]}},
            "required": ["what"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "find"}}


class Answer(BaseModel):
    """Of two kinds."""

    kind: Literal["yes", "no"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A tiny model that thinks before it says 12."""
    pieces = ("\n", THINK, "a", "b", "<", "/", "t", "h", "i", "n", "k", ">", "1", "2", END)
    model = save_chain(tmp_path_factory.mktemp("chain"), *pieces)
    with LLM(str(model), reasoning_format="think") as made:
        yield made


def said(pieces: Iterable[Piece]) -> str:
    """The text of some pieces, without the lines that a thought may be followed by."""
    return "".join(piece.text for piece in pieces).replace("\n", "")


def test_a_schema_holds_for_what_follows_reasoning(llm: LLM) -> None:
    output = llm.chat(ASKED, OPTIONS, schema=Answer)
    assert output.message["reasoning_content"] == "ab"
    assert Answer.model_validate_json(output.message["content"]).kind in ("yes", "no")
    assert output.choices[0].finish_reason == "stop"


def test_a_call_and_its_result_are_messages_to_go_on_with(llm: LLM) -> None:
    first = llm.chat(ASKED, OPTIONS, tools=[FIND], tool_choice=NAMED)
    (call,) = first.message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"what": "owls"} and first.message["content"] is None
    history = [*ASKED, first.message, {"role": "tool", "tool_call_id": call["id"], "content": "two"}]
    assert llm.chat(history, OPTIONS, tools=[FIND]).message["content"] == "12"


def test_a_stream_has_what_was_found_as_it_comes(llm: LLM) -> None:
    pieces = list(llm.stream_chat(ASKED, OPTIONS, tools=[FIND], tool_choice="required"))
    events = [event for piece in pieces for event in piece.events]
    kinds = [type(event) for event in events if not isinstance(event, CallArguments)]
    assert kinds[-2:] == [CallOpened, CallClosed] or kinds.count(CallOpened) > 1
    assert "".join(piece.text for piece in pieces).startswith("<think>ab</think>")


def test_a_sessions_turns_call_tools_and_keep_to_schemas(llm: LLM) -> None:
    with llm.session() as session:
        events = [
            event for piece in session.chat(ASKED, OPTIONS, tools=[FIND], tool_choice=NAMED) for event in piece.events
        ]
        (opened,) = [event for event in events if isinstance(event, CallOpened)]
        result = [{"role": "tool", "tool_call_id": opened.id, "content": "two"}]
        (*_, last) = session.chat(result, OPTIONS, tools=[FIND])
        assert last.finished is not None and last.finished.usage.cached_tokens > 0
        assert said(session.chat(ASKED, OPTIONS, schema={"const": 7})) == "<think>ab</think>7"
        with pytest.raises(RequestError, match="tools: must be those of the session's first messages"):
            list(session.chat(ASKED, OPTIONS, tools=[{**FIND, "function": {"name": "other"}}]))
        assert session.state().turns == 3


def test_a_grammar_of_options_waits_for_reasoning_where_messages_are_answered(llm: LLM) -> None:
    options = Options(temperature=0, max_new_tokens=60, grammar=choice_grammar(["7"]))
    with llm.session() as session:
        assert said(session.generate(ASKED, options)) == "<think>ab</think>7"
        session.append(ASKED)
        assert said(session.generate(None, options)) == "<think>ab</think>7"
        assert said(session.generate(" and", options)) == "7"
    assert llm.generate("x", options).text == "7" == said(llm.stream("x", options))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"schema": {"uniqueItems": True}}, "schema: cannot be enforced"),
        ({"schema": 5}, "schema: must be a JSON schema"),
        ({"schema": {}, "options": Options(grammar="start: /a/")}, "schema: cannot be given with options.grammar"),
        ({"options": Options(grammar="start: nobody")}, "grammar: cannot be enforced"),
        ({"options": Options(grammar="{")}, "grammar: must be Lark"),
        ({"options": Options(grammar="start: /a/", ignore_eos=True)}, "ignore_eos: cannot be given with a grammar"),
        ({"tools": 5}, "tools: must be a list"),
        ({"tools": [5]}, r"tools\[0\]: must be an object"),
        ({"tool_choice": "required"}, "tool_choice: needs tools"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(llm: LLM, given: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        llm.chat(ASKED, **given)
    with pytest.raises(RequestError, match=told):
        list(llm.stream_chat(ASKED, **given))


def test_a_system_message_that_tools_are_added_to_is_a_text(llm: LLM) -> None:
    for content in (None, [{"type": "text", "text": "a"}]):
        with pytest.raises(RequestError, match=r"messages\[0\].content: must be a text"):
            llm.chat([{"role": "system", "content": content}, *ASKED], OPTIONS, tools=[FIND])


@pytest.mark.parametrize("flag", ["tool_format", "reasoning_format"])
def test_a_format_that_there_is_none_of_is_refused(tmp_path: Path, flag: Any) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} must be one of"):
        LLM(str(save_chain(tmp_path, "a")), **{flag: "thnk"})
