"""Bad requests, drawn from the schemas: which endpoint, which bytes, and which parameter the answer must name."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect

from roost.server.message_schema import CountTokensBody, MessagesBody
from roost.server.response_schema import ConversationBody, InputTokensBody, ResponseBody
from roost.server.schema import (
    AbortBody,
    AppendBody,
    ChatBody,
    CloseNativeBody,
    CompletionBody,
    DetokenizeBody,
    FlushBody,
    ForkBody,
    GenerateBody,
    OpenBody,
    OpenNativeBody,
    RewindBody,
    TokenizeBody,
    TurnBody,
)

Path = tuple[str | int, ...]
SESSION = "fuzzed"  # the name of a session that the test has opened
MARK = "@@mark@@"  # stands for bytes that no JSON library would write

# Every POST endpoint with a good body that reaches into each of its parts.
ENDPOINTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatBody,
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 1}),
    "/generate": (GenerateBody, {"text": "a", "sampling_params": {"max_new_tokens": 1}}),
    "/abort_request": (AbortBody, {"rid": "nobody"}),
    "/flush_cache": (FlushBody, {}),
    "/open_session": (OpenNativeBody, {"capacity_of_str_len": 1}),
    "/close_session": (CloseNativeBody, {"session_id": "nobody"}),
    "/v1/sessions": (OpenBody, {}),
    f"/v1/sessions/{SESSION}/append": (AppendBody, {"text": "a"}),
    f"/v1/sessions/{SESSION}/generate": (TurnBody, {"text": "a", "max_tokens": 1}),
    f"/v1/sessions/{SESSION}/rewind": (RewindBody, {"turn": 0}),
    f"/v1/sessions/{SESSION}/fork": (ForkBody, {}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/responses": (
        ResponseBody,
        {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "max_output_tokens": 1,
            "store": False,
        },
    ),
    "/v1/responses/input_tokens": (InputTokensBody, {"input": "a"}),
    "/v1/conversations": (ConversationBody, {"items": [{"type": "message", "role": "user", "content": "a"}]}),
    "/v1/messages": (
        MessagesBody,
        {
            "model": "default",
            "max_tokens": 1,
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "text", "text": "b"}]},
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
            ],
            "thinking": {"type": "disabled"},
            "output_config": {"effort": "low"},
        },
    ),
    "/v1/messages/count_tokens": (
        CountTokensBody,
        {"model": "default", "messages": [{"role": "user", "content": "a"}]},
    ),
}
WEIGHTS = (6, 5, 6, 2, 1, 1, 1, 2, 2, 4, 1, 1, 2, 1, 6, 2, 2, 6, 2)
VALUES = {"int": 7, "float": 0.5, "str": "x", "bool": True, "list": [[]], "dict": {"z": 1}}
NOT_NUMBERS = ("NaN", "Infinity", "-Infinity")
HUGE = ("9" * 30, "-" + "9" * 30, "9" * 5000, "1e300", "-1e300", "1e999", str(2**63))
BROKEN_TEXTS = (b'"\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\xc3"', b'"a\\udc00b"')
MAY_BE_VERY_NEGATIVE = ("seed", "sampling_seed")


@dataclass(frozen=True, slots=True)
class Case:
    """One bad request."""

    what: str
    endpoint: str
    data: bytes
    params: tuple[str, ...]  # one of these, or a part of one, must be named


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body, where it stands, and which JSON it takes."""

    path: Path
    kinds: frozenset[str]

    @property
    def name(self) -> str:
        """The field as a client would call it."""
        return name_of(self.path)


def name_of(path: Path) -> str:
    """A path as it is written: messages[0].role."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(".")


def fields(kind: type[msgspec.Struct], body: Any, path: Path = ()) -> Iterator[Field]:
    """Every field of a schema; those of its parts too, where the body has one."""
    for field in msgspec.structs.fields(kind):
        here = (*path, field.encode_name)
        told = inspect.type_info(field.type)
        yield Field(here, frozenset(_kinds(told)))
        yield from _parts(told, body.get(field.encode_name), here)


def _parts(told: inspect.Type, value: Any, path: Path) -> Iterator[Field]:
    for struct in _structs(told):
        if isinstance(value, dict):
            yield from fields(struct, value, path)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                yield from fields(struct, each, (*path, number))


def _structs(told: inspect.Type) -> Iterator[type[msgspec.Struct]]:
    match told:
        case inspect.StructType():
            yield told.cls
        case inspect.UnionType():
            for each in told.types:
                yield from _structs(each)
        case inspect.ListType():
            yield from _structs(told.item_type)


def _kinds(told: inspect.Type) -> Iterator[str]:
    match told:
        case inspect.UnionType():
            for each in told.types:
                yield from _kinds(each)
        case inspect.FloatType():
            yield from ("float", "int")
        case inspect.StructType():
            yield "dict"
        case _:
            yield type(told).__name__.removesuffix("Type").lower()


def changed(body: Any, path: Path, value: Any) -> Any:
    """A copy of a body with one value in it replaced or added."""
    copy = json.loads(json.dumps(body))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copy


def with_bytes(body: Any, path: Path, raw: bytes) -> bytes:
    """A body with some bytes in place of a value."""
    return json.dumps(changed(body, path, MARK)).encode().replace(json.dumps(MARK).encode(), raw)


Draw = Callable[[random.Random, str], Case | None]


def _drawn_field(draw: random.Random, endpoint: str) -> tuple[Field, Any]:
    kind, body = ENDPOINTS[endpoint]
    found = list(fields(kind, body))
    return (draw.choice(found) if found else Field(("z",), frozenset())), body


def wrong_type(draw: random.Random, endpoint: str) -> Case | None:
    """A value of a type that the field does not take."""
    field, body = _drawn_field(draw, endpoint)
    wrong = [value for kind, value in VALUES.items() if kind not in field.kinds]
    value = {"z": 1} if "any" in field.kinds else draw.choice(wrong)
    return Case("wrong type", endpoint, json.dumps(changed(body, field.path, value)).encode(), (field.name,))


def null(draw: random.Random, endpoint: str) -> Case | None:
    """Null where nothing else will do."""
    field, body = _drawn_field(draw, endpoint)
    if field.kinds & {"none", "any"}:
        return None
    return Case("null", endpoint, json.dumps(changed(body, field.path, None)).encode(), (field.name,))


def not_a_number(draw: random.Random, endpoint: str) -> Case | None:
    """Numbers that are none, alone or among others."""
    field, body = _drawn_field(draw, endpoint)
    raw = draw.choice(("%s", "[1, %s]", '{"1": %s}')) % draw.choice(NOT_NUMBERS)
    return Case("not a number", endpoint, with_bytes(body, field.path, raw.encode()), (field.name,))


def huge(draw: random.Random, endpoint: str) -> Case | None:
    """Numbers beyond what any option can mean."""
    field, body = _drawn_field(draw, endpoint)
    raw = draw.choice(("%s", "[%s]", '{"1": %s}')) % draw.choice(HUGE)
    return Case("huge", endpoint, with_bytes(body, field.path, raw.encode()), (field.name,))


def negative(draw: random.Random, endpoint: str) -> Case | None:
    """Numbers that are far too small."""
    field, body = _drawn_field(draw, endpoint)
    if not field.kinds & {"int", "float"} or field.path[-1] in MAY_BE_VERY_NEGATIVE:
        return None
    return Case("negative", endpoint, json.dumps(changed(body, field.path, -(2**62))).encode(), (field.name,))


def unknown(draw: random.Random, endpoint: str) -> Case | None:
    """A field that nobody knows, at any depth."""
    field, body = _drawn_field(draw, endpoint)
    path = (*field.path[:-1], draw.choice(("zeta", "Temperature", "__class__", "é", "a b", "max_tokens2", "")))
    return Case("unknown", endpoint, json.dumps(changed(body, path, 1)).encode(), (name_of(path) or "body",))


def missing(draw: random.Random, endpoint: str) -> Case | None:
    """What must be there is not."""
    required = {
        "/v1/chat/completions": (("messages",), ("messages", 0, "role"), ("messages", 1, "content", 0, "type")),
        "/v1/completions": (("prompt",),),
        "/generate": (("text",),),
        "/abort_request": (("rid",),),
        "/open_session": (("capacity_of_str_len",),),
        "/close_session": (("session_id",),),
        f"/v1/sessions/{SESSION}/append": (("text",),),
        f"/v1/sessions/{SESSION}/rewind": (("turn",),),
        "/tokenize": (("prompt",),),
        "/detokenize": (("tokens",),),
        "/v1/responses": (("input",), ("text", "format", "type")),
        "/v1/responses/input_tokens": (("input",),),
        "/v1/messages": (("model",), ("max_tokens",), ("messages", 1, "role"), ("thinking", "type")),
        "/v1/messages/count_tokens": (("messages",),),
    }
    if endpoint not in required:
        return None
    path = draw.choice(required[endpoint])
    body = json.loads(json.dumps(ENDPOINTS[endpoint][1]))
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return Case("missing", endpoint, json.dumps(body).encode(), (name_of(path),))


def empty(draw: random.Random, endpoint: str) -> Case | None:
    """Nothing, where something is needed; or a body that is no object."""
    names = {"/v1/chat/completions": ["messages"], "/v1/completions": ["prompt"], "/generate": ["text", "input_ids"]}
    if draw.random() < 0.5 or endpoint not in names:
        raw = draw.choice((b"[]", b'"x"', b"null", b"7", b"{", b'{"a"', b"\x00", b'{"a": 1,}', b"{} {}"))
        return Case("no object", endpoint, raw, ("body",))
    name = draw.choice(names[endpoint])
    value: Any = draw.choice(([], [[]], "")) if name == "prompt" else "" if name == "text" else []
    body = changed(ENDPOINTS[endpoint][1], (name,), value)
    if name == "input_ids":
        del body["text"]
    return Case("empty", endpoint, json.dumps(body).encode(), (name,))


def deep(draw: random.Random, endpoint: str) -> Case | None:
    """Nested further than anybody reads."""
    field, body = _drawn_field(draw, endpoint)
    depth = draw.choice((40, 400, 5000, 50000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    raw = (opening * depth + "1" + closing * depth).encode()
    return Case("deep", endpoint, with_bytes(body, field.path, raw), (field.name, "body"))


def broken_text(draw: random.Random, endpoint: str) -> Case | None:
    """Bytes that are no text, as a value or as a name."""
    field, body = _drawn_field(draw, endpoint)
    raw = draw.choice(BROKEN_TEXTS)
    if draw.random() < 0.3:
        return Case("broken name", endpoint, b'{"stream": false, ' + raw + b": 1}", ("?", "a?b", "body"))
    return Case("broken text", endpoint, with_bytes(body, field.path, raw), (field.name, "body"))


def long_array(draw: random.Random, endpoint: str) -> Case | None:
    """Arrays and objects that are far too long, whatever is in them."""
    field, body = _drawn_field(draw, endpoint)
    if field.path[-1] in ("input_ids", "messages") and "text" in body:
        del (body := dict(body))["text"]
    value = draw.choice(([1] * 20_000, ["x"] * 3_000, [[]] * 3_000, {str(key): 1 for key in range(2_000)}))
    return Case("long array", endpoint, json.dumps(changed(body, field.path, value)).encode(), (field.name,))


DRAWS: tuple[Draw, ...] = (
    *(wrong_type, null, not_a_number, huge, negative, unknown),
    *(missing, empty, deep, broken_text, long_array),
)


def cases(num_cases: int, seed: int) -> list[Case]:
    """So many bad requests, the same for the same seed."""
    draw = random.Random(seed)
    found: list[Case] = []
    while len(found) < num_cases:
        endpoints = list(ENDPOINTS)
        case = draw.choice(DRAWS)(draw, draw.choices(endpoints, weights=WEIGHTS)[0])
        if case is not None:
            found.append(case)
    return found
