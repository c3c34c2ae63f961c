"""The description of the endpoints: complete, well formed, and its examples are what the server takes."""

import re
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest
from starlette.routing import Route

from roost.server.app import make_app
from roost.server.body_reader import convert
from roost.server.compat import NO_OP_VALUES
from roost.server.config import ServerConfig
from roost.server.engine_process import EngineProcess
from roost.server.openapi import ALL_UNSUPPORTED, OPERATIONS, description
from roost.server.schema import UNSUPPORTED, refuse_unsupported
from roost.server.state import ServerState

NO_BODY = {("POST", "/v1/responses/{id}/cancel")}
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    """The app's own."""
    app = make_app(ServerState(ServerConfig(), cast(EngineProcess, object())))
    return [route for route in app.routes if isinstance(route, Route)]


@pytest.fixture(scope="module")
def page(routes: list[Route]) -> dict[str, Any]:
    """The description as clients get it."""
    read: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(description(routes)))
    return read


def operations(page: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of everything described."""
    for path, item in page["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def values(node: Any, key: str) -> Iterator[Any]:
    """Every value of a key, at any depth."""
    if isinstance(node, dict):
        yield from ([node[key]] if key in node else [])
        for each in node.values():
            yield from values(each, key)
    elif isinstance(node, list):
        for each in node:
            yield from values(each, key)


def test_every_route_is_described_and_nothing_else(routes: list[Route], page: dict[str, Any]) -> None:
    app = {
        (method.lower(), re.sub(r":\w+", "", route.path))
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(method, path) for method, path, _ in operations(page)} == app
    assert {(method.lower(), path) for method, path in OPERATIONS} == app, "nothing is said of what is not there"


def test_it_is_an_openapi_document_of_version_3_1(page: dict[str, Any]) -> None:
    assert page["openapi"] == "3.1.0" and set(page["info"]) == {"title", "version"}
    assert set(page) == {"openapi", "info", "paths", "components", "security"}
    names = [operation["operationId"] for _, _, operation in operations(page)]
    assert len(set(names)) == len(names)
    for method, path, operation in operations(page):
        assert method in METHODS and path.startswith("/")
        declared = [each["name"] for each in operation.get("parameters", [])]
        assert declared == re.findall(r"\{(\w+)\}", path)
        assert operation["responses"] and all("description" in each for each in operation["responses"].values())
        assert ("requestBody" in operation) == (method == "post" and (method.upper(), path) not in NO_BODY)
    schemas = page["components"]["schemas"]
    for ref in values(page, "$ref"):
        assert ref.removeprefix("#/components/schemas/") in schemas
    for pattern in values(schemas, "pattern"):
        assert "\\Z" not in pattern, "patterns are JavaScript's"


def test_every_example_is_a_body_that_the_server_takes() -> None:
    bodies = {key: about for key, about in OPERATIONS.items() if about.body is not None}
    assert {key for key in OPERATIONS if key[0] == "POST"} - NO_BODY == set(bodies)
    for about in bodies.values():
        assert about.body is not None
        body = convert(msgspec.json.encode(about.example), about.body)
        if about.body in UNSUPPORTED:
            refuse_unsupported(body)


def test_a_foreign_field_is_described_by_the_values_that_it_may_have(page: dict[str, Any]) -> None:
    for kind, names in ALL_UNSUPPORTED.items():
        properties = page["components"]["schemas"][kind.__name__]["properties"]
        for name in names:
            assert properties[name]["enum"] == [None, *map(list_or_same, NO_OP_VALUES.get(name, ()))]


def list_or_same(value: Any) -> Any:
    """A value as JSON has it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def test_every_value_that_is_accepted_is_of_a_field_that_is_known() -> None:
    known = {name for names in ALL_UNSUPPORTED.values() for name in names}
    assert set(NO_OP_VALUES) <= known
