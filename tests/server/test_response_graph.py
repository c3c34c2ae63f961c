"""A random graph of responses against a plain list of messages for each: texts are equal, and inheritance is predicted.

The model of a conversation is its tokens: those of a prompt as /tokenize has them, those of an answer as names. From
them follows what every response finds: all of its session's tokens where it goes on in place, else the whole pages
that it has in common with anything that was committed before.
"""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.support.server_process import Server, wait_until

PAGE_SIZE = 16
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0}
Symbols = tuple[Any, ...]


@dataclass(eq=False)
class Held:
    """A session, as far as the model knows."""

    tokens: Symbols


@dataclass(eq=False)
class Node:
    """A response that may be followed."""

    id: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    tokens: Symbols = ()
    session: Held | None = None


class Graph:
    """All responses so far, and what is predicted of the next."""

    def __init__(self, server: Server, client: openai.OpenAI, seed: int) -> None:
        self.server, self.client = server, client
        self.choose = random.Random(seed)
        self.nodes = [Node()]
        self.published: list[Symbols] = []
        self.num_asked = 0

    def question(self) -> str:
        """One that is asked for the first time, or once more."""
        self.num_asked += 1
        number = self.choose.choice([self.num_asked, max(1, self.num_asked - 1)])
        return (
            self.choose.choice(["Tell me about number", "Number", "Please say something longer about"]) + f" {number}."
        )

    def body(self, parent: Node, question: str) -> dict[str, Any]:
        """What is sent for it."""
        previous = {} if parent.id is None else {"previous_response_id": parent.id}
        return {**GREEDY, "input": [{"role": "user", "content": question}], **previous}

    def predicted(self, parent: Node, prompt: Symbols, *, is_kept: bool, is_alone: bool = True) -> int:
        """How many tokens of a prompt will be found."""
        session = parent.session
        if is_kept and is_alone and session is not None and session.tokens == parent.tokens:
            return len(parent.tokens)
        longest = max((common(prompt, other) for other in self.published), default=0)
        # what a draft head has of a token takes the next one, so the last one in common does not count
        return max(0, min(longest, len(prompt)) - 1) // PAGE_SIZE * PAGE_SIZE

    def follow(self, parent: Node, question: str, response: Response, *, is_alone: bool = True) -> Node:
        """The node of a response, which must be what was predicted."""
        usage = response.usage
        assert usage is not None
        messages = [*parent.messages, {"role": "user", "content": question}]
        rendered = self.server.post("/tokenize", {"messages": messages}).json()["tokens"]
        prompt = (*parent.tokens, *rendered[len(rendered) - (usage.input_tokens - len(parent.tokens)) :])
        is_kept = bool(response.store)
        expected = self.predicted(parent, prompt, is_kept=is_kept, is_alone=is_alone)
        assert usage.input_tokens_details.cached_tokens == expected, (question, len(parent.tokens), len(prompt))
        tokens = (*prompt, *((hash(prompt), place) for place in range(usage.output_tokens)))
        self.published.append(tokens)
        node = Node(id=response.id if is_kept else None, messages=messages, tokens=tokens)
        node.messages.append({"role": "assistant", "content": response.output_text})
        if is_kept:
            in_place = is_alone and parent.session is not None and parent.session.tokens == parent.tokens
            node.session = parent.session if in_place and parent.session is not None else Held(tokens)
            node.session.tokens = tokens
            self.nodes.append(node)
        return node

    def go_on(self, *, store: bool) -> None:
        """Follow any response."""
        parent, question = self.choose.choice(self.nodes), self.question()
        made = self.client.responses.create(
            **self.body(parent, question), store=store, max_output_tokens=self.choose.randint(3, 20)
        )
        node = self.follow(parent, question, made)
        fresh = self.client.responses.create(
            **GREEDY,
            input=node.messages[:-1],
            store=False,
            max_output_tokens=made.max_output_tokens,  # type: ignore[arg-type]
        )
        assert (fresh.output_text, fresh.status) == (made.output_text, made.status)
        assert fresh.usage is not None and made.usage is not None
        assert fresh.usage.input_tokens == made.usage.input_tokens

    def leave(self) -> None:
        """Begin to follow any response, and go away."""
        parent = self.choose.choice(self.nodes)
        with closing(
            self.client.responses.create(**self.body(parent, self.question()), stream=True, max_output_tokens=300)
        ) as events:
            for _ in zip(range(self.choose.randint(1, 6)), events, strict=False):
                pass
        wait_until(lambda: self.server.stats()["running"] == 0)

    def branch(self) -> None:
        """Follow one response twice at once, on two lanes of a socket: one goes on in place, the other in a fork."""
        parent = self.choose.choice(self.nodes)
        asked = {lane: f"{self.question()} As {lane}." for lane in ("a", "b")}
        ended: dict[str, Response] = {}
        with self.client.responses.connect() as socket:
            for lane, question in asked.items():
                body = {**self.body(parent, question), "max_output_tokens": 12}
                socket.send({"type": "response.create", "stream_id": lane, **body})  # type: ignore[typeddict-item]
            while len(ended) < 2:
                event = json.loads(socket.recv_bytes())
                assert event["type"] != "error", event
                if event["type"] in ("response.completed", "response.incomplete"):
                    ended[event["stream_id"]] = Response.model_validate(event["response"])
        place = {lane: cached(made) == len(parent.tokens) for lane, made in ended.items()}
        first, second = sorted(asked, key=lambda lane: not place[lane])
        before, self.published = self.published, list(self.published)
        self.follow(parent, asked[first], ended[first])
        after, self.published = self.published, before  # nothing of the first was committed when the second began
        self.follow(parent, asked[second], ended[second], is_alone=parent.session is None)
        self.published += after[len(before) - 1 :]

    def forget(self) -> None:
        """Delete everything."""
        for node in self.nodes[1:]:
            assert node.id is not None
            self.client.responses.delete(node.id)


def common(one: Symbols, other: Symbols) -> int:
    """How many first tokens two have in common."""
    differs = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def cached(response: Response) -> int:
    """Tokens that it inherited."""
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


@pytest.fixture
def empty(rested: Server) -> Iterator[Server]:
    """A server whose prefix cache holds nothing."""
    assert rested.post("/flush_cache").status_code == 200
    yield rested


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_a_random_graph_of_responses_is_its_conversations(empty: Server, client: openai.OpenAI, seed: int) -> None:
    graph = Graph(empty, client, seed)
    try:
        for _ in range(16):
            match graph.choose.choice(["store", "store", "store", "no store", "leave", "branch"]):
                case "store":
                    graph.go_on(store=True)
                case "no store":
                    graph.go_on(store=False)
                case "leave":
                    graph.leave()
                case "branch":
                    graph.branch()
    finally:
        graph.forget()
