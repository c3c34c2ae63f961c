"""How an agent's loop is served: `python -m bench.agent_loop`. Three ways by turns, over one real `roost serve`.

A WebSocket, and responses over HTTP, which both send only what is new; and chat completions, which send the whole
history again with no label, so that only the prefix cache helps. A call has exactly `--tokens` tokens of output, and
about as many of new input: a user message of random words that stands for a tool's result, since a
`function_call_output` would need a call that the model has made. Before that, idle sockets and active ones: what one of
each adds to the server's memory. `--shape 8b` is for a GPU, `--shape tiny` a rehearsal of it (`bench.agent_model`).
"""

import argparse
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from bench.processes import Process

_FOUR_LETTERS = (
    "able also area back ball band bank base bird blue boat body book born both call came camp card care case cell "
    "city cold come cool copy cost dark data date dead deal deep door down draw dust each earn east easy edge even "
    "ever face fact fair fall farm fast feel feet file fill film find fine fire fish five flat food foot form four "
    "free from full game gave girl give gold gone good grow"
)
WORDS = _FOUR_LETTERS.split()  # each one token, of the default model and of `agent_model`
DEFAULT = "default"
DEFAULT_CONTEXT = 8192
DEFAULT_TOKENS, SHAPE_TOKENS = 120, 300
DEFAULT_EOS_IDS = (0, 2)  # the default model's ends of a text and of a message
MESSAGE_TOKENS = 16  # most that a template adds to a message
WARM_CALLS, WARM_SOCKETS = 2, 4
SHORT_TOKENS = 16  # of an active socket's input and output
SPARE_FILES = 256
PATIENCE_S = 600
LAST_EVENTS = ("response.completed", "response.incomplete")
FAILURES = ("error", "response.failed")

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a loop, answered."""

    first_ms: float  # until the first text
    num_events: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    bytes_sent: int  # by the client, with headers and frames
    response_id: str
    text: str


@dataclass(slots=True, kw_only=True)
class Heard:
    """What has come of an answer so far, from either API."""

    began: float
    bytes_sent: int
    first_ms: float = 0.0
    num_events: int = 0
    response_id: str = ""
    is_done: bool = False
    usage: tuple[int, int, int] = (0, 0, 0)  # prompt, cached of those, output
    pieces: list[str] = field(default_factory=list)

    def take_response_event(self, event: Fields) -> None:
        """An event of the Responses API."""
        kind = event["type"]
        if kind in FAILURES:
            raise RuntimeError(f"the server answered {event}")
        self._take_text(event["delta"] if kind == "response.output_text.delta" else "")
        if kind in LAST_EVENTS:
            usage = event["response"]["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            self.usage = usage["input_tokens"], cached, usage["output_tokens"]
            self.response_id, self.is_done = event["response"]["id"], True

    def take_chat_event(self, event: Fields) -> None:
        """An event of chat completions."""
        if "error" in event:
            raise RuntimeError(f"the server answered {event}")
        self._take_text((event["choices"][0]["delta"].get("content") if event["choices"] else "") or "")
        if usage := event.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self.usage, self.is_done = (usage["prompt_tokens"], cached, usage["completion_tokens"]), True

    def _take_text(self, text: str) -> None:
        self.num_events += 1
        if text:
            self.first_ms = self.first_ms or 1e3 * (time.perf_counter() - self.began)
            self.pieces.append(text)

    def call(self) -> Call:
        """All of it, once it is done."""
        assert self.is_done and self.first_ms, self
        prompt_tokens, cached_tokens, output_tokens = self.usage
        return Call(
            first_ms=self.first_ms,
            num_events=self.num_events,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            bytes_sent=self.bytes_sent,
            response_id=self.response_id,
            text="".join(self.pieces),
        )


# --- the three ways ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and the fields that make an answer greedy and as long as it may be."""

    url: str
    sampling: Fields


Say = Callable[[list[Fields], int], Call]  # new messages and the number of output tokens, to the answer
Way = Callable[[Target], AbstractContextManager[Say]]


def opened(target: Target) -> AbstractContextManager[ClientConnection]:
    """A WebSocket; it answers the server's pings and sends none."""
    address = target.url.replace("http", "ws", 1) + "/v1/responses"
    return connect(address, compression=None, proxy=None, ping_interval=None, max_size=None, open_timeout=PATIENCE_S)


def ask_socket(socket: ClientConnection, body: Fields) -> Call:
    """One response on a WebSocket."""
    message = json.dumps({"type": "response.create", "store": False, **body})
    heard = Heard(began=time.perf_counter(), bytes_sent=frame_bytes(len(message)))
    socket.send(message)
    while not heard.is_done:
        heard.take_response_event(json.loads(socket.recv(PATIENCE_S)))
    return heard.call()


def frame_bytes(length: int) -> int:
    """Bytes of a client's frame with a payload of some length: 2, those of a long length, and 4 of its mask."""
    return 2 + (0 if length < 126 else 2 if length < 65536 else 8) + 4 + length


@contextmanager
def connected(target: Target) -> Iterator[httpx.Client]:
    """A client whose connection is open, as a WebSocket's is before the first call."""
    with httpx.Client(base_url=target.url, timeout=PATIENCE_S, trust_env=False) as client:
        client.get("/ready").raise_for_status()
        yield client


def ask_http(client: httpx.Client, path: str, body: Fields, take: Callable[[Heard, Fields], None]) -> Call:
    """One streamed request; its first line and headers are among the bytes."""
    request = client.build_request("POST", path, json={"stream": True, **body})
    head = sum(len(name) + len(value) + 4 for name, value in request.headers.raw) + 2
    first_line = len(f"{request.method} {request.url.path} HTTP/1.1\r\n")
    heard = Heard(began=time.perf_counter(), bytes_sent=first_line + head + len(request.content))
    response = client.send(request, stream=True)
    try:
        if response.status_code != 200:
            raise RuntimeError(f"the server answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                take(heard, json.loads(line.removeprefix("data: ")))
    finally:
        response.close()
    return heard.call()


def response_body(target: Target, new: list[Fields], num_tokens: int, after: str) -> Fields:
    """A body of the Responses API."""
    previous = {"previous_response_id": after} if after else {}
    return {**target.sampling, "input": new, "max_output_tokens": num_tokens, **previous}


@contextmanager
def socket_way(target: Target) -> Iterator[Say]:
    """Responses on one WebSocket, none of them stored."""
    with opened(target) as socket:
        last = ""

        def say(new: list[Fields], num_tokens: int) -> Call:
            nonlocal last
            call = ask_socket(socket, response_body(target, new, num_tokens, last))
            last = call.response_id
            return call

        yield say


@contextmanager
def responses_way(target: Target) -> Iterator[Say]:
    """Responses over HTTP, all of them stored, and deleted at the end."""
    with connected(target) as client:
        made: list[str] = []

        def say(new: list[Fields], num_tokens: int) -> Call:
            body = response_body(target, new, num_tokens, made[-1] if made else "")
            call = ask_http(client, "/v1/responses", {"store": True, **body}, Heard.take_response_event)
            made.append(call.response_id)
            return call

        yield say
        for each in made:
            client.delete(f"/v1/responses/{each}").raise_for_status()


@contextmanager
def chat_way(target: Target) -> Iterator[Say]:
    """Chat completions with the whole history each time."""
    with connected(target) as client:
        history: list[Fields] = []

        def say(new: list[Fields], num_tokens: int) -> Call:
            history.extend(new)
            sent = {"messages": history, "max_tokens": num_tokens, "stream_options": {"include_usage": True}}
            call = ask_http(client, "/v1/chat/completions", {**target.sampling, **sent}, Heard.take_chat_event)
            history.append({"role": "assistant", "content": call.text})
            return call

        yield say


WAYS: dict[str, Way] = {"WebSocket": socket_way, "Responses": responses_way, "chat": chat_way}


# --- loops -------------------------------------------------------------------------------------------------------


def words(draw: random.Random, number: int) -> str:
    """A text of so many tokens; texts differ from the first words on, so that none finds another's pages."""
    return "".join(f" {word}" for word in draw.choices(WORDS, k=number))


def script(seed: str, num_calls: int, num_tokens: int) -> list[list[Fields]]:
    """The new messages of each call: a system text and a question, then results of tools."""
    draw = random.Random(seed)
    half = max(1, num_tokens // 2)
    first = [{"role": "system", "content": words(draw, half)}, {"role": "user", "content": words(draw, half)}]
    results = [[{"role": "user", "content": words(draw, num_tokens)}] for _ in range(num_calls - 1)]
    return [first, *results]


def server_cpu_s(process: Process) -> float:
    """Processor time of the server process so far, without its engine's."""
    values = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def loop(process: Process, target: Target, way: Way, messages: list[list[Fields]], num_tokens: int) -> dict[str, float]:
    """One loop in one way."""
    cpu_s = server_cpu_s(process)
    with way(target) as say:
        calls = [say(new, num_tokens) for new in messages]
        cpu_s = server_cpu_s(process) - cpu_s
    assert all(call.output_tokens == num_tokens for call in calls), [call.output_tokens for call in calls]
    last, num_events = calls[-1], sum(call.num_events for call in calls)
    return {
        "last_first_token_ms": last.first_ms,
        "first_first_token_ms": calls[0].first_ms,
        "mean_first_token_ms": statistics.mean(call.first_ms for call in calls),
        "last_prompt_tokens": last.prompt_tokens,
        "last_cached_tokens": last.cached_tokens,
        "last_bytes_sent": last.bytes_sent,
        "num_events": num_events,
        "server_cpu_us_per_event": 1e6 * cpu_s / num_events,
    }


def loops(process: Process, target: Target, num_calls: int, num_tokens: int, repeats: int) -> dict[str, Fields]:
    """Medians of each way, the ways by turns; with the smallest and largest first-token time of the last call."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for name, way in WAYS.items():
        loop(process, target, way, script(f"warm {name}", WARM_CALLS, num_tokens), num_tokens)
    for repeat in range(repeats):
        for name, way in WAYS.items():
            found = loop(process, target, way, script(f"{name} {repeat}", num_calls, num_tokens), num_tokens)
            runs[name].append(found)
            print(f"  loop {repeat + 1}, {name}: last {found['last_first_token_ms']:.1f} ms", file=sys.stderr)
    return {name: _summary(each) for name, each in runs.items()}


def _summary(runs: list[dict[str, float]]) -> Fields:
    medians: Fields = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    last = [run["last_first_token_ms"] for run in runs]
    return {**medians, "last_first_token_ms_range": [min(last), max(last)]}


# --- sockets -----------------------------------------------------------------------------------------------------


def sockets(process: Process, target: Target, num_idle: int, num_active: int) -> dict[str, float]:
    """Memory that sockets add to the server process; the active ones answered all at once, and then stay open."""
    draw = random.Random("sockets")

    def ask(socket: ClientConnection) -> Call:
        new = [{"role": "user", "content": words(draw, SHORT_TOKENS)}]
        call = ask_socket(socket, response_body(target, new, SHORT_TOKENS, ""))
        assert call.output_tokens == SHORT_TOKENS, call
        return call

    with ExitStack() as warm:
        for _ in range(WARM_SOCKETS):
            ask(warm.enter_context(opened(target)))
    with ExitStack() as stack:
        before_mb, began = process.resident_mb()[0], time.perf_counter()
        idle = [stack.enter_context(opened(target)) for _ in range(num_idle // 2)]
        half_mb = process.resident_mb()[0]
        idle += [stack.enter_context(opened(target)) for _ in range(num_idle - num_idle // 2)]
        open_s, idle_mb = time.perf_counter() - began, process.resident_mb()[0]
        active = [stack.enter_context(opened(target)) for _ in range(num_active)]
        with ThreadPoolExecutor(max(1, num_active)) as clients:
            began = time.perf_counter()
            calls = list(clients.map(ask, active))
            answered_s = time.perf_counter() - began
        active_mb = process.resident_mb()[0]
        waits = [socket.ping() for socket in idle]
        num_alive = sum(wait.wait(PATIENCE_S) for wait in waits)
        assert num_alive == num_idle and len(calls) == num_active, (num_alive, len(calls))
    return {
        "num_idle": num_idle,
        "num_active": num_active,
        "server_mb_before": before_mb,
        "server_mb_idle": idle_mb,
        "server_mb_active": active_mb,
        # of the second half: the first ones fill what the start has left free
        "server_kb_per_idle": 1e3 * (idle_mb - half_mb) / max(1, num_idle - num_idle // 2),
        "server_kb_per_active": 1e3 * (active_mb - idle_mb) / max(1, num_active),
        "open_ms_per_socket": 1e3 * open_s / max(1, num_idle),
        "first_token_ms_max": max((call.first_ms for call in calls), default=0.0),
        "all_answered_s": answered_s,
    }


def allow_files(number: int) -> None:
    """Let this process and the server, which inherits it, open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < number:
        raise SystemExit(f"--sockets: {number} open files are needed, and the system allows {hard}")
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


# --- the server --------------------------------------------------------------------------------------------------


@contextmanager
def model_flags(args: argparse.Namespace, num_tokens: int) -> Iterator[list[str]]:
    """The server's flags for a model with room for a loop; a random model is written first."""
    needed = args.calls * (2 * num_tokens + 2 * MESSAGE_TOKENS) + 8 * MESSAGE_TOKENS
    if args.shape == DEFAULT:
        sure = args.calls * 2 * num_tokens
        if sure > DEFAULT_CONTEXT:
            raise SystemExit(f"--calls, --tokens: {sure} tokens do not fit into {DEFAULT_CONTEXT}")
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="roost-agent-") as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "config.json").is_file():  # it is written last
            command = [sys.executable, "-m", "bench.agent_model", "--shape", args.shape, "--out", str(folder)]
            subprocess.run(command, check=True)
        yield ["--model", str(folder), "--context", str(max(needed, DEFAULT_CONTEXT))]


def measure(args: argparse.Namespace, num_tokens: int) -> Fields:
    """Start a server and measure all of it."""
    num_sockets = args.sockets + args.active
    allow_files(num_sockets + SPARE_FILES)
    with model_flags(args, num_tokens) as flags:
        command = [sys.executable, "-m", "roost", "serve", "--port", "0", "--log-requests", "failed", "--spec", "none"]
        with Process([*command, *flags, *shlex.split(args.serve_flags)]) as process:
            told = httpx.get(f"{process.url}/server_info", trust_env=False).json()
            # an end is biased away, since responses have no ignore_eos; the other models never draw one
            endless = {"logit_bias": {str(id): -100 for id in DEFAULT_EOS_IDS}} if args.shape == DEFAULT else {}
            target = Target(url=process.url, sampling={"temperature": 0, **endless})
            # before the loops: what they free would be taken for sockets, and growth would not show
            found = sockets(process, target, args.sockets, args.active) if num_sockets else None
            ways = loops(process, target, args.calls, num_tokens, args.repeats)
    return {
        "shape": args.shape,
        "settings": told["settings"],
        "start_s": process.ready_s,
        "calls": args.calls,
        "tokens": num_tokens,
        "repeats": args.repeats,
        "ways": ways,
        "sockets": found,
    }


COLUMNS = {
    "last call, ms": "last_first_token_ms",
    "first call, ms": "first_first_token_ms",
    "mean, ms": "mean_first_token_ms",
    "prompt": "last_prompt_tokens",
    "cached": "last_cached_tokens",
    "bytes sent": "last_bytes_sent",
    "events": "num_events",
    "server us/event": "server_cpu_us_per_event",
}


def table(report: Fields) -> Iterator[str]:
    """The report as lines."""
    yield f"{report['calls']} calls, {report['tokens']} tokens of output each; time to first token, then the last call"
    yield "  ".join(["way      ", *(f"{title:>15}" for title in COLUMNS)])
    for name, found in report["ways"].items():
        values = [found[column] for column in COLUMNS.values()]
        yield "  ".join([f"{name:9}", *(f"{value:15,.1f}" for value in values)])
    if (found := report["sockets"]) is not None:
        idle = f"{found['num_idle']} idle sockets: {found['server_kb_per_idle']:.1f} kB each"
        active = f"{found['num_active']} active: {found['server_kb_per_active']:.1f} kB each"
        yield f"{idle}; {active}, all answered in {found['all_answered_s']:.2f} s"


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=(DEFAULT, "8b", "tiny"), default=DEFAULT)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument(
        "--tokens", type=int, help=f"of each output; {SHAPE_TOKENS}, the default model {DEFAULT_TOKENS}"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sockets", type=int, default=1000, help="idle ones")
    parser.add_argument("--active", type=int, default=64, help="sockets that are answered at once")
    parser.add_argument("--folder", type=Path, help="keeps the model of a shape for the next run; written if absent")
    parser.add_argument("--serve-flags", default="", help="more flags for roost serve, in one text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_tokens = args.tokens or (DEFAULT_TOKENS if args.shape == DEFAULT else SHAPE_TOKENS)
    report = measure(args, num_tokens)
    print("\n".join(table(report)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
