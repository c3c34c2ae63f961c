"""OpenAI's Responses API, spoken by its own client: every response is a turn, and inherits what is predicted."""

import asyncio
import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, Field

from tests.server.conftest import StartTiny
from tests.support.server_process import Server

GREEDY: dict[str, Any] = {"model": "default", "temperature": 0, "max_output_tokens": 12}
ADD = {
    "type": "function",
    "name": "add",
    "description": "The sum of two numbers",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Agent:
    """A client that forgets nothing it has stored, so that the server can be as it was."""

    def __init__(self, server: Server, client: openai.OpenAI) -> None:
        self.server = server
        self.client = client
        self.ids: list[str] = []

    def say(self, text: Any, after: Response | None = None, **changes: Any) -> Response:
        """A response, stored unless told otherwise."""
        previous = {} if after is None else {"previous_response_id": after.id}
        made: Response = self.client.responses.create(**{**GREEDY, "input": text, **previous, **changes})
        if made.store:
            self.ids.append(made.id)
        return made

    def forget(self) -> None:
        """Delete what was stored."""
        for id in self.ids:
            self.client.responses.delete(id)


@pytest.fixture
def agent(rested: Server, client: openai.OpenAI) -> Iterator[Agent]:
    """An agent on the server with the real model."""
    agent = Agent(rested, client)
    yield agent
    agent.forget()


def cached(response: Response) -> int:
    """Tokens that it inherited."""
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def total(response: Response) -> int:
    """Tokens that its session holds after it."""
    assert response.usage is not None
    return response.usage.total_tokens


def test_a_response_goes_on_where_the_one_before_it_ended(agent: Agent) -> None:
    first = agent.say("Name a colour.")
    second = agent.say("And an animal.", first)
    assert cached(second) == total(first)
    assert second.previous_response_id == first.id
    whole = agent.client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in whole] == ["message"] * 3


def test_two_children_of_one_response_are_two_forks(agent: Agent) -> None:
    first = agent.say("Name a colour.", max_output_tokens=30)
    children = [agent.say(text, first) for text in ("And an animal.", "And a city.", "And an animal.")]
    assert children[0].output_text == children[2].output_text
    assert all(cached(child) >= total(first) - 40 for child in children[1:])  # whole pages of it


def test_instructions_are_not_inherited(agent: Agent) -> None:
    first = agent.say("Hello.", instructions="Always answer in French.")
    second = agent.say("Hello again.", first)
    fresh = agent.say(
        [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Hello again."},
        ]
    )
    assert second.instructions is None and second.output_text == fresh.output_text


def test_a_stream_has_the_events_that_the_client_enforces(agent: Agent) -> None:
    with agent.client.responses.stream(
        model="default",
        input="Say ok.",
        temperature=0,
        max_output_tokens=300,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    agent.ids.append(final.id)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == final.output_text
    assert any(event.logprobs for event in deltas)


def test_a_tool_is_called_and_its_result_answered(agent: Agent) -> None:
    call = agent.say(
        "What is 2 + 3? Use the tool.",
        tools=[ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=80,
    )
    (item,) = call.output
    assert item.type == "function_call" and json.loads(item.arguments).keys() == {"a", "b"}
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
    answer = agent.say([result], call, tools=[ADD, {"type": "web_search"}])
    assert cached(answer) == total(call)
    assert [tool.type for tool in answer.tools] == ["function"]


def test_a_conversation_grows_by_its_responses(agent: Agent) -> None:
    conversations = agent.client.conversations
    made = conversations.create(items=[{"type": "message", "role": "user", "content": "My name is Ann."}])
    first = agent.say("Hello.", conversation=made.id)
    second = agent.say("Who am I?", conversation=made.id)
    assert cached(second) == total(first)
    items = conversations.items.list(made.id, order="asc").data
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    conversations.items.delete(items[-1].id, conversation_id=made.id)  # type: ignore[arg-type]
    assert len(conversations.items.list(made.id).data) == len(items) - 1
    assert conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        conversations.retrieve(made.id)


def test_a_response_in_the_background_is_read_later_or_cancelled(agent: Agent) -> None:
    made = agent.say("Tell a story.", background=True)
    assert made.status == "queued"
    while (found := agent.client.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        pass
    assert found.status == "incomplete" and found.output_text
    for _ in range(8):  # at once: its session may just have been opened
        long = agent.say("Tell a long story.", background=True, max_output_tokens=1500)
        assert agent.client.responses.cancel(long.id).status == "cancelled"


def test_a_stream_in_the_background_can_be_left_and_read_on(agent: Agent) -> None:
    stream = agent.client.responses.create(**GREEDY, input="Tell a story.", background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    assert first.type == "response.created"
    agent.ids.append(first.response.id)
    rest = list(agent.client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1].type in ("response.completed", "response.incomplete")


def test_an_answer_is_parsed_into_a_model_of_the_clients(agent: Agent) -> None:
    class Colour(BaseModel):
        name: str = Field(max_length=20)
        is_warm: bool

    made = agent.client.responses.parse(
        model="default", input="Name a colour as JSON.", text_format=Colour, temperature=0, max_output_tokens=120
    )
    agent.ids.append(made.id)
    assert isinstance(made.output_parsed, Colour)


def test_input_can_be_added_before_anything_is_generated(agent: Agent) -> None:
    warm = agent.say("A long text about colours.", extra_body={"generate": False}, max_output_tokens=openai.omit)
    assert (warm.status, warm.output) == ("completed", [])
    answer = agent.say("Name one.", warm)
    assert cached(answer) == total(warm)


def test_what_cannot_be_had_is_refused_by_name(agent: Agent) -> None:
    client = agent.client
    for body, param in (
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            client.responses.create(**{**GREEDY, "input": "x", **body})
        assert (refused.value.param or "").startswith(param), (body, refused.value)
    assert agent.server.http.get("/v1/responses/resp_none").status_code == 404


def test_a_socket_answers_in_lanes_and_keeps_what_is_not_stored(agent: Agent) -> None:
    with agent.client.responses.connect() as socket:
        for lane in ("a", "b", "a"):
            socket.send(
                {"type": "response.create", "stream_id": lane, "store": False, "input": f"Say {lane}.", **GREEDY}
            )
        ended: list[tuple[str, str]] = []
        while len(ended) < 3:
            event = json.loads(socket.recv_bytes())
            assert event["type"] != "error", event
            if event["type"] in ("response.completed", "response.incomplete"):
                ended.append((event["stream_id"], event["response"]["id"]))
        assert sorted(lane for lane, _ in ended) == ["a", "a", "b"]
        socket.send(
            {"type": "response.create", "store": False, "previous_response_id": ended[0][1], "input": "More.", **GREEDY}
        )
        while (event := json.loads(socket.recv_bytes()))["type"] not in ("response.completed", "response.incomplete"):
            assert event["type"] != "error", event
        assert event["response"]["usage"]["input_tokens_details"]["cached_tokens"] > 0
        for message, code in (
            (
                {"type": "response.create", "previous_response_id": "resp_none", "input": "x"},
                "previous_response_not_found",
            ),
            ({"type": "response.create", "input": "x", "truncation": "auto"}, None),
            ({"type": "response.wrong"}, None),
        ):
            socket.send(message)  # type: ignore[arg-type]
            event = json.loads(socket.recv_bytes())
            assert (event["type"], event["error"]["code"]) == ("error", code)
        socket.send({"type": "response.steer", "input": "x", "previous_response_id": "resp_none"})
        assert json.loads(socket.recv_bytes())["error"]["code"] == "steering_not_supported"


def test_a_socket_that_is_cut_keeps_what_was_committed(agent: Agent) -> None:
    first = agent.say("Name a colour.")
    for num_events in range(0, 8, 2):
        with agent.client.responses.connect() as socket:
            socket.send(
                {
                    "type": "response.create",
                    "input": "Go on.",
                    "previous_response_id": first.id,
                    "store": False,
                    **GREEDY,
                }
            )
            for _ in range(num_events):
                socket.recv_bytes()
    again = agent.say("Go on.", first)
    assert cached(again) >= total(first) - 40


def test_the_asynchronous_client_works_too(agent: Agent) -> None:
    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=agent.client.base_url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(**GREEDY, input="Say ok.", stream=True, store=False)
            kinds = [event.type async for event in stream]
            async with client.responses.connect() as socket:
                await socket.send({"type": "response.create", "input": "Say ok.", "store": False, **GREEDY})
                async for event in socket:
                    if event.type in ("response.completed", "response.incomplete"):
                        break
            return kinds[-1]

    assert asyncio.run(talk()) in ("response.completed", "response.incomplete")


def test_a_labelled_chat_inherits_and_says_the_same(agent: Agent) -> None:
    messages: list[Any] = []
    held = 0
    for text in ("Name a colour.", "And an animal.", "And a city."):
        messages.append({"role": "user", "content": text})
        usual = {"model": "default", "messages": messages, "max_tokens": 12, "temperature": 0.8, "seed": 4}
        labelled = agent.client.chat.completions.create(**usual, prompt_cache_key="label of a test")
        plain = agent.client.chat.completions.create(**usual)
        said = labelled.choices[0].message.content
        assert said == plain.choices[0].message.content
        assert labelled.usage is not None and labelled.usage.prompt_tokens_details is not None
        cached_tokens = labelled.usage.prompt_tokens_details.cached_tokens or 0
        assert cached_tokens == held or not held  # the first one has what the prefix cache has
        held = labelled.usage.total_tokens
        messages.append({"role": "assistant", "content": said})
    agent.server.close_sessions()


def test_a_server_that_stops_lets_sockets_and_the_background_finish(start_tiny: StartTiny) -> None:
    server = start_tiny()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = {"model": "default", "input": "x", "max_output_tokens": 300, "logit_bias": {"2": -100}}
    background = server.post("/v1/responses", {**body, "background": True}).json()
    assert background["status"] == "queued"
    with client.responses.connect() as socket:
        socket.send({"type": "response.create", **body})  # type: ignore[typeddict-item]
        while json.loads(socket.recv_bytes())["type"] != "response.output_text.delta":
            pass
        server.process.send_signal(signal.SIGTERM)
        while (event := json.loads(socket.recv_bytes()))["type"] == "response.output_text.delta":
            pass
        while event["type"] not in ("response.completed", "response.incomplete"):
            event = json.loads(socket.recv_bytes())
    assert server.process.wait(timeout=120) == 0
    assert "Traceback" not in server.log
