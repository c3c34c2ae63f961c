"""Frameworks that agents are built with, unchanged, against a real server: instructor and LangChain."""

from typing import Any

import instructor
import openai
import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.support.server_process import Server

MODEL = "SmolLM2-135M-Instruct"
ANNA = "Anna is 31 years old."
SUM = "What is 17 plus 25? Use the add function."


class Person(BaseModel):
    """Somebody, by name and age."""

    name: str
    age: int


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    """LangChain's model."""
    return ChatOpenAI(
        model=MODEL, base_url=f"{server.url}/v1", api_key=SecretStr("none"), temperature=0, max_retries=0, timeout=240
    )


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=lambda mode: mode.name)
def test_instructor_extracts_a_model(client: openai.OpenAI, mode: instructor.Mode) -> None:
    patched = instructor.from_openai(client, mode=mode)
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": ANNA}], "temperature": 0}
    found = patched.chat.completions.create(**asked, response_model=Person, max_retries=0)
    assert isinstance(found, Person) and found.age == 31


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_extracts_a_model(chat: ChatOpenAI, method: Any) -> None:
    found = chat.with_structured_output(Person, method=method).invoke(ANNA)
    assert isinstance(found, Person) and found.age == 31


def test_langchain_calls_a_tool_and_goes_on_with_its_result(chat: ChatOpenAI) -> None:
    called = chat.bind_tools([add], tool_choice="add").invoke(SUM)
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert call["name"] == "add" and add.invoke(call["args"]) == 42
    told = ToolMessage(content="42", tool_call_id=call["id"] or "")
    answer = chat.bind_tools([add]).invoke([{"role": "user", "content": SUM}, called, told])
    assert "42" in str(answer.content)


def test_langchain_streams_the_pieces_of_a_call(chat: ChatOpenAI) -> None:
    pieces = list(chat.bind_tools([add], tool_choice="add").stream(SUM))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    (call,) = whole.tool_calls
    assert call["name"] == "add" and call["args"] == {"a": 17, "b": 25}
