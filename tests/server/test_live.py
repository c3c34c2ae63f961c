"""The live page's routes: what is open, what needs a key, and whether the numbers are those of /metrics."""

import json
import re

import httpx
import pytest

from tests.server.conftest import StartTiny
from tests.support.server_process import Server

pytestmark = pytest.mark.usefixtures("start_tiny")


def first_frame(server: Server, key: str = "") -> dict:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.stream("GET", f"{server.url}/live/frames", headers=headers, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                if told["whole"]:
                    return told
    raise AssertionError("no frame came")


def test_the_page_comes_with_a_strict_policy_and_its_files(start_tiny: StartTiny) -> None:
    server = start_tiny()
    page = httpx.get(f"{server.url}/live")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy
    for name in re.findall(r"(?:src|href)=\"/live/([^\"]+)\"", page.text):
        answer = httpx.get(f"{server.url}/live/{name}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
    for name in ("nothing.js", "..%2fapp.py", "__init__.py"):
        assert httpx.get(f"{server.url}/live/{name}").status_code == 404


def test_pages_and_frames_have_the_sums_of_the_metrics(start_tiny: StartTiny) -> None:
    server = start_tiny()
    httpx.post(f"{server.url}/v1/sessions", json={"id": "walk"}).raise_for_status()
    body = {"input_ids": list(range(5, 45)), "max_tokens": 6, "temperature": 0}
    httpx.post(f"{server.url}/v1/sessions/walk/generate", json=body, timeout=60).raise_for_status()
    assert httpx.post(f"{server.url}/v1/sessions", json={"id": "walk"}).status_code == 409
    metrics = httpx.get(f"{server.url}/metrics").text
    counts = {
        (book, account): float(value)
        for book, account, value in re.findall(r'roost_pages\{account="(\w+)",book="(\w+)"\} (\S+)', metrics)
    }
    pools = httpx.get(f"{server.url}/v1/pages").json()["pools"]
    assert pools and 'roost_refusals_total{status="409"} 1.0' in metrics
    for pool in pools:
        for account in ("free", "leased", "cached", "retiring"):
            assert counts[account, pool["book"]] == pool[account]
            kinds = {account, "window"} if account == "leased" else {account}
            assert sum(run["count"] for run in pool["pages"] if run["kind"] in kinds) == pool[account]
        assert "session walk, idle" in {run["owner"] for run in pool["pages"]}
    told = first_frame(server)
    assert told["health"] == "ok" and told["totals"]["refusals"] == {"409": 1}
    (session,) = told["sessions"]
    assert (session["id"], session["length"], session["turns"]) == ("walk", 46, [46])
    assert "used_ms" not in session and session["idle_ms"] >= 0
    assert not told["shows_text"] and told["model"]


def test_frames_and_pages_need_an_admins_key(start_tiny: StartTiny) -> None:
    server = start_tiny("--api-key", "first", "--api-key", "second")
    for path in ("/live/frames", "/v1/pages"):
        assert httpx.get(f"{server.url}{path}").status_code == 401
        assert httpx.get(f"{server.url}{path}", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(f"{server.url}{path}", headers={"authorization": "Bearer second"}).status_code == 403
    assert httpx.get(f"{server.url}/live").status_code == 200
    assert first_frame(server, "first")["whole"]
