"""The live page in a real browser: what it shows is what the engine does, and its chat is a session."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.conftest import StartTiny
from tests.server.test_ends import in_background
from tests.support.chain_model import save_chain
from tests.support.live_browser import NETWORK, LivePage, launch
from tests.support.server_process import Server, Stream, wait_until
from tests.support.tiny_folder import ENDLESS

FOLDER = Path(__file__).parents[2] / "src/roost/server/live"
SPELT = ("\n", "h", "e", "12", "!", "<|im_end|>")  # the answer to any message of the chat
PAGE_BYTES_MAX = 100_000  # of all files together: a page that loads at once
BYTES_SPARE = 1_000_000  # of the heap, that come and go with what is shown
NODES_SPARE = 200  # of elements and texts

OpenPage = Callable[..., LivePage]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for all of these."""
    playwright, browser = launch()
    yield browser
    browser.close()
    playwright.stop()


@pytest.fixture
def open_page(browser: Any) -> Iterator[OpenPage]:
    """Open the page of a server; whatever should not happen fails the test."""
    opened: list[tuple[LivePage, str]] = []

    def open_one(url: str, *, allowed: str = "nothing", **look: Any) -> LivePage:
        opened.append((LivePage(browser, url, **look), allowed))
        return opened[-1][0]

    yield open_one
    for page, allowed in opened:
        page.close(allowed=allowed)


@pytest.fixture(scope="module")
def chain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose answers are known, that runs one request and lets one wait."""
    model = save_chain(tmp_path_factory.mktemp("chain"), *SPELT)
    limits = ("--max-running", "1", "--max-queued", "1", "--page-size", "4", "--pool-tokens", "16384")
    started = Server(tmp_path_factory.mktemp("server"), "--model", str(model), "--threads", "1", *limits)
    try:
        yield started
    finally:
        started.kill()


@pytest.fixture
def chain(chain_server: Server) -> Iterator[Server]:
    """The same; its sessions are closed in the end."""
    yield chain_server
    chain_server.close_sessions()


@pytest.fixture
def drafting(rested: Server) -> Iterator[Server]:
    """A server with the default model and its draft head; its sessions are closed in the end."""
    yield rested
    rested.close_sessions()


def turn(server: Server, session: str, text: str = "hi") -> None:
    """A turn of a session."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8}
    assert server.post(f"/v1/sessions/{session}/generate", body).status_code == 200


def cells_are_the_pools(state: dict[str, Any]) -> bool:
    """Whether the cells that are shown add up to what the same frame says of each pool."""
    for pool in state["pools"].values():
        cells = pool["cells"]
        held = {**{name: cells[name] for name in ("free", "cached", "retiring")}, "leased": cells["leased"]}
        held["leased"] += cells["window"]
        if any(pool[name] != number for name, number in held.items()) or cells["padding"] != 1:
            return False
        if sum(held.values()) != pool["total"]:
            return False
    return True


def metrics_of_pages(server: Server) -> dict[str, int]:
    """What /metrics says of the pages."""
    found = re.findall(r'roost_pages\{account="(\w+)",book="full"\} (\S+)', server.http.get("/metrics").text)
    return {name: int(float(number)) for name, number in found}


def test_the_page_is_small_and_complete_and_holds_no_script_or_style_of_its_own() -> None:
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|https?://(?!www\.w3\.org/)", html)
    sources = {path.name: path.read_text() for path in FOLDER.iterdir()}
    for name, source in sources.items():
        assert len(source.splitlines()) < 500, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source), (
            name
        )
        for imported in re.findall(r'from "\./([^"]+)"', source):
            assert imported in sources
    for linked in re.findall(r'(?:href|src)="live/([^"]+)"', html):
        assert linked in sources
    assert sum(len(source.encode()) for source in sources.values()) < PAGE_BYTES_MAX


def test_sessions_and_forks_are_shown_and_cells_add_up(chain: Server, open_page: OpenPage) -> None:
    live = open_page(chain.url).is_live()
    for session in ("walk", "essay"):
        assert chain.post("/v1/sessions", {"id": session}).status_code == 201
        turn(chain, session)
    turn(chain, "walk")
    assert chain.post("/v1/sessions/walk/fork", {"id": "branch", "turn": 1}).status_code == 201
    turn(chain, "branch", "something else")
    state = live.until(lambda state: {"walk", "essay", "branch"} <= {each["id"] for each in state["sessions"]})
    state = live.until(lambda state: cells_are_the_pools(state) and not (state["rows"] or state["queue"]))
    shown = {each["id"]: each for each in state["sessions"]}
    for session, told in shown.items():
        asked = chain.http.get(f"/v1/sessions/{session}").json()
        assert (told["length"], len(told["turns"])) == (asked["length"], asked["turns"])
    assert (shown["branch"]["parent"], shown["walk"]["parent"]) == ("walk", None)
    live.page.wait_for_selector('[data-session="branch"][data-depth="1"]')
    assert "fork of walk" in live.text('[data-session="branch"]')
    wanted = metrics_of_pages(chain)
    state = live.until(lambda state: state["pools"]["full"]["free"] == wanted["free"])
    assert {name: state["pools"]["full"][name] for name in wanted} == wanted
    assert cells_are_the_pools(state)
    live.shot("sessions")


def test_a_cell_names_its_owner(chain: Server, open_page: OpenPage) -> None:
    live = open_page(chain.url).is_live()
    assert chain.post("/v1/sessions", {"id": "owner"}).status_code == 201
    turn(chain, "owner")
    live.until(lambda state: any(each["id"] == "owner" and each["turns"] for each in state["sessions"]))
    live.page.focus("#books canvas")
    seen = set()
    for _ in range(40):
        live.page.keyboard.press("ArrowRight")
        seen.add(re.sub(r"^page \d+ · ", "", live.text("#books .tip")))
    assert any("session owner" in text for text in seen), seen


def test_what_waits_is_shown_with_its_reason_and_what_is_refused_is_counted(chain: Server, open_page: OpenPage) -> None:
    live = open_page(chain.url).is_live()
    first = Stream(
        chain, "/generate", {"text": "a", "sampling_params": ENDLESS | {"max_new_tokens": 4000}, "stream": True}
    )
    first.next()
    os.kill(chain.engine_pid, signal.SIGSTOP)  # so that it does not end before the others have come
    try:
        second = in_background(lambda: chain.post("/generate", {"text": "b", "sampling_params": {"max_new_tokens": 8}}))
        live.until(lambda state: state["status"] == "stalled")
        third = in_background(lambda: chain.post("/generate", {"text": "c", "sampling_params": {"max_new_tokens": 8}}))
    finally:
        os.kill(chain.engine_pid, signal.SIGCONT)
    state = live.until(lambda state: state["rows"] and state["queue"] and state["totals"]["refusals"].get("429"))
    assert state["queue"][0]["waits"]
    live.page.wait_for_selector("#queue li .more:not(:empty)")
    live.shot("queue")
    first.close()
    assert sorted([second().status_code, third().status_code]) == [200, 429]
    live.until(lambda state: not state["rows"] and state["totals"]["endings"].get("abort"))
    assert "429" in live.text('#counters [data-name="refused"]')
    assert "abort" in live.text('#counters [data-name="ended"]')
    live.until(cells_are_the_pools)


def test_the_chat_holds_a_conversation_rewinds_and_forks(chain: Server, open_page: OpenPage) -> None:
    live = open_page(chain.url).is_live()
    page = live.page
    for number, text in enumerate(("hello", "again")):
        live.say(text)
        page.wait_for_selector(f'.log:visible [data-turn="{number}"]')
        assert live.text(f'.log:visible [data-turn="{number}"] .answer').strip() == "he12!"
        assert "tokens" in live.text(f'.log:visible [data-turn="{number}"] .figures-line')
    session = page.get_attribute("#chat", "data-session")
    assert chain.http.get(f"/v1/sessions/{session}").json()["turns"] == 2
    page.click('.log:visible [data-turn="0"] .fork')
    page.wait_for_selector('#tabs [aria-selected="true"]:has-text("fork")')
    assert page.locator(".log:visible .turn").count() == 1
    fork = page.get_attribute("#chat", "data-session")
    assert fork != session
    live.say("another way")
    page.wait_for_selector('.log:visible [data-turn="1"]')
    state = live.until(lambda state: any(each["id"] == fork and len(each["turns"]) == 2 for each in state["sessions"]))
    assert next(each for each in state["sessions"] if each["id"] == fork)["parent"] == session
    live.shot("fork")
    page.click('#tabs [role="tab"] >> nth=0')
    page.click('.log:visible [data-turn="1"] .rewind')
    page.wait_for_selector('.log:visible [data-turn="1"]', state="detached")
    assert page.input_value("#message") == "again", "to be said in another way"
    assert chain.http.get(f"/v1/sessions/{session}").json()["turns"] == 1
    live.say("again, please")
    page.wait_for_selector('.log:visible [data-turn="1"]')
    page.click("#new-chat")
    assert page.locator("#tabs [role='tab']").count() == 3
    page.locator("#tabs .close").nth(1).click()
    wait_until(lambda: chain.http.get(f"/v1/sessions/{fork}").status_code == 404)
    page.close(run_before_unload=True)
    wait_until(lambda: chain.http.get(f"/v1/sessions/{session}").status_code == 404)


def test_an_answer_that_is_stopped_leaves_the_session_where_it_was(chain: Server, open_page: OpenPage) -> None:
    live = open_page(chain.url).is_live()
    live.say("hello")
    live.page.wait_for_selector('.log:visible [data-turn="0"]')
    session = live.page.get_attribute("#chat", "data-session")
    before = chain.http.get(f"/v1/sessions/{session}").json()["turns"]
    os.kill(chain.engine_pid, signal.SIGSTOP)
    try:
        live.say("never mind")
        live.page.click("#stop")
        live.page.wait_for_selector(".log:visible .loose")
        live.until(lambda state: state["status"] == "stalled")
        live.shot("stalled")
    finally:
        os.kill(chain.engine_pid, signal.SIGCONT)
    live.until(lambda state: state["status"] == "ok" and not state["rows"])
    assert live.page.input_value("#message") == "never mind"
    wait_until(lambda: chain.http.get(f"/v1/sessions/{session}").json()["state"] == "idle")
    assert chain.http.get(f"/v1/sessions/{session}").json()["turns"] == before
    live.say("once more")
    live.page.wait_for_selector('.log:visible [data-turn="1"]')
    assert live.page.locator(".log:visible .loose").count() == 0


def test_an_engine_that_dies_is_shown_and_the_page_recovers(start_tiny: StartTiny, open_page: OpenPage) -> None:
    server = start_tiny()
    live = open_page(server.url, allowed=NETWORK).is_live()
    os.kill(server.engine_pid, signal.SIGKILL)
    live.until(lambda state: state["status"] in ("gone", "lost"))
    assert re.search("gone|reconnecting", live.text("#status"))
    live.shot("gone")
    server.process.wait()
    live.until(lambda state: state["status"] == "lost")
    again = start_tiny("--port", str(urlsplit(server.url).port))
    live.is_live()
    state = live.until(lambda state: state["totals"]["steps"] == 0 and cells_are_the_pools(state))
    assert state["sessions"] == []
    again.check_rest()


def test_silence_is_shown_and_the_page_recovers(start_tiny: StartTiny, open_page: OpenPage) -> None:
    server = start_tiny()
    live = open_page(server.url, allowed=NETWORK).is_live()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        live.until(lambda state: state["status"] == "lost")
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    live.is_live()
    server.check_rest()


def test_an_eviction_is_shown(start_tiny: StartTiny, open_page: OpenPage) -> None:
    server = start_tiny("--pool-tokens", "512", "--context", "512")
    live = open_page(server.url).is_live()
    for token, session in enumerate(("first", "second"), start=20):
        assert server.post("/v1/sessions", {"id": session}).status_code == 201
        body = {"input_ids": [token] * 300, "max_tokens": 8, "ignore_eos": True}
        assert server.post(f"/v1/sessions/{session}/generate", body).status_code == 200
    state = live.until(lambda state: state["totals"]["sessions_reclaimed"] and len(state["sessions"]) == 2)
    state = live.until(lambda state: state["sessions"][0]["resident"] == 0 and not state["rows"])
    assert state["sessions"][0]["length"] > 0
    assert "0 resident" in live.text('[data-session="first"]')
    live.until(cells_are_the_pools)
    live.shot("eviction")


def test_a_page_that_nobody_sees_asks_for_nothing(chain: Server, open_page: OpenPage) -> None:
    live = open_page(chain.url).is_live()
    ended: list[str] = []
    live.page.on("requestfailed", lambda request: ended.append(request.url))
    live.page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    live.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    live.until(lambda state: f"{chain.url}/live/frames" in ended)
    seen = live.state()["frames"]
    live.page.evaluate("Object.defineProperty(document, 'hidden', {value: false})")
    live.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    live.until(lambda state: state["frames"] > seen and state["status"] == "ok")


def test_a_wrong_key_is_asked_for_again(friendly: Server, open_page: OpenPage) -> None:
    live = open_page(friendly.url, allowed=NETWORK)
    live.until(lambda state: state["status"] == "denied")
    assert live.page.is_visible("#key-form")
    live.page.fill("#key", "foe")
    live.page.press("#key", "Enter")
    live.page.wait_for_selector("#key-error:not(:empty)")
    live.shot("key")
    live.page.fill("#key", "friend")
    live.page.press("#key", "Enter")
    live.is_live()
    assert not live.page.is_visible("#key-form")
    live.page.reload()
    live.is_live()


def test_a_client_that_may_not_watch_may_chat(start_tiny: StartTiny, open_page: OpenPage, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[operator]\nkeys = ["sk-operator"]\nadmin = true\n[alice]\nkeys = ["sk-alice"]\n')
    keys.chmod(0o600)
    live = open_page(start_tiny("--api-keys", str(keys)).url, allowed=NETWORK)
    live.until(lambda state: state["status"] == "denied")
    live.page.fill("#key", "sk-alice")
    live.page.press("#key", "Enter")
    live.page.wait_for_selector("#key-error:not(:empty)")
    live.say("hello")
    live.page.wait_for_selector('.log:visible [data-turn="0"]')
    live.page.fill("#key", "sk-operator")
    live.page.press("#key", "Enter")
    live.is_live()


def test_drafts_and_what_they_cost_are_shown(drafting: Server, open_page: OpenPage) -> None:
    live = open_page(drafting.url, scheme="dark").is_live()
    live.say("Count from one to twenty.")
    live.page.wait_for_selector('.log:visible [data-turn="0"]')
    assert "accept" in live.text('.log:visible [data-turn="0"] .figures-line')
    state = live.until(lambda state: state["tree"] and state["spec"]["rounds"] and state["steps"])
    assert state["tree"]["parents"][0] == -1 and state["tree"]["accepted"][0] == 0
    live.page.wait_for_selector(f'#tree[data-nodes="{len(state["tree"]["parents"])}"]')
    assert live.page.locator("#places li").count() > 0
    assert "texts" not in state["tree"], "texts are not shown unless asked for"
    live.shot("drafts_dark")


@pytest.mark.parametrize("width", [360, 820, 2560])
def test_it_fits_any_screen(chain: Server, open_page: OpenPage, width: int) -> None:
    live = open_page(chain.url, width=width).is_live()
    live.say("hello")
    live.page.wait_for_selector('.log:visible [data-turn="0"]')
    assert live.page.evaluate("document.documentElement.scrollWidth") <= width
    live.shot(f"{width}px")


@pytest.mark.parametrize(
    ("sessions", "frames"), [(20, 40), pytest.param(200, 2400, marks=pytest.mark.full)], ids=["short", "ten minutes"]
)
def test_its_memory_stays_flat(start_tiny: StartTiny, open_page: OpenPage, sessions: int, frames: int) -> None:
    server = start_tiny("--max-sessions", str(sessions))
    live = open_page(server.url).is_live()
    for number in range(sessions):
        assert server.post("/v1/sessions", {"id": f"s{number}"}).status_code == 201
    live.until(lambda state: len(state["sessions"]) == sessions)
    debugger = live.page.context.new_cdp_session(live.page)

    def heap() -> tuple[int, int]:
        debugger.send("HeapProfiler.collectGarbage")
        counted = debugger.send("Memory.getDOMCounters")
        return debugger.send("Runtime.getHeapUsage")["usedSize"], counted["nodes"]

    def work(until_frame: int) -> None:
        number = 0
        while live.state()["frames"] < until_frame:
            server.post(f"/v1/sessions/s{number % sessions}/generate", {"text": "a", "max_tokens": 16})
            server.post(f"/v1/sessions/s{number % sessions}/rewind", {"turn": 0})
            number += 1

    work(live.state()["frames"] + frames // 2)
    bytes_before, nodes_before = heap()
    work(live.state()["frames"] + frames // 2)
    bytes_after, nodes_after = heap()
    assert bytes_after < bytes_before + BYTES_SPARE
    assert nodes_after < nodes_before + NODES_SPARE
    assert live.state()["steps"] <= 512
