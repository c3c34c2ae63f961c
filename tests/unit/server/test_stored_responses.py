"""Stored responses and conversations over HTTP: pages, streams that are read again, limits, and whose they are."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from roost.server.config import ServerConfig
from roost.server.keys import read_keys
from roost.server.openai_responses import ITEMS_MAX
from tests.support.talking_engine import SAID, talking_server

PAGE_DEFAULT, PAGE_MAX = 20, 100
HELLO = {"type": "message", "role": "user", "content": "Hello."}


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Run a test's story."""
    asyncio.run(story())  # type: ignore[arg-type]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_response_in_the_background_is_streamed_and_read_again_from_any_event() -> None:
    async def story() -> None:
        async with talking_server() as (_, http):
            body = {"input": "Hello.", "background": True, "stream": True}
            streamed = events(await http.post("/v1/responses", json=body))
            kinds = [event["type"].removeprefix("response.") for event in streamed]
            assert kinds[:3] == ["created", "queued", "in_progress"] and kinds[-1] == "completed"
            assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
            path = f"/v1/responses/{streamed[0]['response']['id']}"
            for after in range(len(streamed)):
                again = await http.get(path, params={"stream": "true", "starting_after": after})
                assert events(again) == streamed[after + 1 :]
            assert events(await http.get(path, params={"stream": "true"})) == streamed
            whole = (await http.get(path)).json()
            assert whole == streamed[-1]["response"] and whole["output"][0]["content"][0]["text"] == SAID

    run(story)


def test_what_a_stored_response_cannot_be_asked_for_is_refused_by_name() -> None:
    async def story() -> None:
        async with talking_server() as (_, http):
            made = (await http.post("/v1/responses", json={"input": "Hello."})).json()
            path = f"/v1/responses/{made['id']}"
            for params, param in (
                ({"stream": "true"}, "stream"),
                ({"stream": "yes"}, "stream"),
                ({"starting_after": "1"}, "starting_after"),
                ({"include_obfuscation": "true"}, "include_obfuscation"),
                ({"include": "file_search_call.results"}, "include[0]"),
                ({"after": "x"}, "after"),
            ):
                refused = await http.get(path, params=params)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), params
            for name in ("input_items", "cancel"):
                assert (await http.post(f"{path}/{name}")).status_code in (400, 405)
            streamed = {"input": "Hello.", "background": True, "stream": True}
            first, *_ = events(await http.post("/v1/responses", json=streamed))
            path = f"/v1/responses/{first['response']['id']}"
            for after in ("-1", "99", "x", "9" * 5000):
                refused = await http.get(path, params={"stream": "true", "starting_after": after})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")

    run(story)


def test_a_list_comes_in_pages() -> None:
    async def story() -> None:
        async with talking_server() as (_, http):
            made = (await http.post("/v1/conversations", json={"items": [HELLO] * ITEMS_MAX})).json()
            path = f"/v1/conversations/{made['id']}/items"
            for _ in range(PAGE_MAX // ITEMS_MAX):
                assert (await http.post(path, json={"items": [HELLO] * ITEMS_MAX})).status_code == 200
            every: list[str] = []
            after: dict[str, str] = {}
            while not every or after:
                page = (await http.get(path, params={"order": "asc", "limit": "50", **after})).json()
                every += [item["id"] for item in page["data"]]
                assert page["last_id"] == every[-1]
                after = {"after": page["last_id"]} if page["has_more"] else {}
            assert len(set(every)) == len(every) == PAGE_MAX + ITEMS_MAX
            newest = (await http.get(path)).json()
            assert [item["id"] for item in newest["data"]] == every[::-1][:PAGE_DEFAULT]
            assert len((await http.get(path, params={"limit": PAGE_MAX})).json()["data"]) == PAGE_MAX
            for limit in ("0", str(PAGE_MAX + 1), "x", "0000000000199", "-1"):
                refused = await http.get(path, params={"limit": limit})
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")

    run(story)


def test_a_conversation_takes_so_many_items_at_once() -> None:
    async def story() -> None:
        async with talking_server() as (_, http):
            assert (await http.post("/v1/conversations", json={"items": [HELLO] * ITEMS_MAX})).status_code == 200
            refused = await http.post("/v1/conversations", json={"items": [HELLO] * (ITEMS_MAX + 1)})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "items")

    run(story)


def test_anothers_responses_and_conversations_are_as_if_they_did_not_exist(tmp_path: Any) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[ann]\nkeys = ["ann-key-0000000000"]\n[bob]\nkeys = ["bob-key-0000000000"]\n')
    keys = read_keys(ServerConfig(api_keys=str(file)))

    async def story() -> None:
        async with talking_server(keys=keys) as (_, http):
            ann, bob = ({"authorization": f"Bearer {name}-key-0000000000"} for name in ("ann", "bob"))
            response = (await http.post("/v1/responses", json={"input": "Hello."}, headers=ann)).json()
            conversation = (await http.post("/v1/conversations", json={}, headers=ann)).json()
            for method, path in (
                ("GET", f"/v1/responses/{response['id']}"),
                ("DELETE", f"/v1/responses/{response['id']}"),
                ("POST", f"/v1/responses/{response['id']}/cancel"),
                ("GET", f"/v1/responses/{response['id']}/input_items"),
                ("GET", f"/v1/conversations/{conversation['id']}"),
                ("DELETE", f"/v1/conversations/{conversation['id']}"),
                ("GET", f"/v1/conversations/{conversation['id']}/items"),
            ):
                assert (await http.request(method, path, headers=bob)).status_code == 404, path
            for field, id in (("previous_response_id", response["id"]), ("conversation", conversation["id"])):
                refused = await http.post("/v1/responses", json={"input": "x", field: id}, headers=bob)
                assert (refused.status_code, refused.json()["error"]["param"]) == (404, field)
            assert (await http.get(f"/v1/responses/{response['id']}", headers=ann)).status_code == 200
            x_api_key = {"x-api-key": "ann-key-0000000000"}
            assert (await http.get(f"/v1/responses/{response['id']}", headers=x_api_key)).status_code == 200
            assert (await http.get("/v1/models", headers={"x-api-key": "wrong"})).status_code == 401

    run(story)
