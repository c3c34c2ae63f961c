"""What can be measured of a server over HTTP with streaming, Roost or another with OpenAI's API: no engine in here.

Each function measures once and returns figures by name. Texts and tokens are the caller's; those that must not be found
in a prompt cache have to differ from the first word on. Used by `versus_llama_cpp`.
"""

import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.sessions import IN_TOKENS, OUT_TOKENS, early_and_late
from roost.cli.bench import RequestTimes
from roost.cli.http_client import HttpClient
from roost.cli.remote_sessions import RemoteServer
from roost.front.options import Options

_GREEDY = {"temperature": 0, "ignore_eos": True}
_STREAMED = {**_GREEDY, "model": "default", "stream": True, "stream_options": {"include_usage": True}}


def random_tokens(number: int, seed: int) -> list[int]:
    """Tokens that are ordinary in the default model's vocabulary."""
    return random.Random(seed).choices(range(100, 40_000), k=number)


def ask(url: str, path: str, prompt: dict[str, Any], new_tokens: int) -> RequestTimes:
    """One request, streamed to its end; the last stamp is the end of the stream."""
    times = RequestTimes(began=time.perf_counter())
    for event in HttpClient(url).stream(path, {**_STREAMED, **prompt, "max_tokens": new_tokens}):
        choice = event["choices"][0] if event["choices"] else {}
        if choice.get("text") or choice.get("delta", {}).get("content"):
            times.stamps.append((time.perf_counter(), 1))
        if usage := event.get("usage"):
            times.output_tokens, times.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            times.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    times.stamps.append((time.perf_counter(), 0))
    assert times.output_tokens == new_tokens, (url, times.output_tokens, new_tokens)
    return times


def chat(url: str, text: str, new_tokens: int) -> RequestTimes:
    """One question."""
    return ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, new_tokens)


def load(url: str, texts: Sequence[str], at_once: int, new_tokens: int) -> dict[str, float]:
    """Questions, so many at once: tokens a second of everything, and of each answer once it has begun."""
    with ThreadPoolExecutor(at_once) as clients:
        began = time.perf_counter()
        done = list(clients.map(lambda text: chat(url, text, new_tokens), texts))
        wall_s = time.perf_counter() - began
    return {
        "tokens_s": sum(times.output_tokens for times in done) / wall_s,
        "decode_tokens_s": statistics.median(
            (times.output_tokens - 1) / (times.stamps[-1][0] - times.stamps[0][0]) for times in done
        ),
        "first_ms": statistics.median(1e3 * (times.stamps[0][0] - times.began) for times in done),
        "cached_share": sum(each.cached_tokens for each in done) / sum(each.prompt_tokens for each in done),
    }


def prefill(url: str, tokens: Sequence[int]) -> float:
    """Prompt tokens a second until the only token of the answer is there."""
    times = ask(url, "/v1/completions", {"prompt": list(tokens)}, 1)
    assert times.cached_tokens < len(tokens) / 20, f"{times.cached_tokens} tokens were cached at {url}"
    return (times.prompt_tokens - times.cached_tokens) / (times.stamps[-1][0] - times.began)


def conversation(url: str, texts: Sequence[str], new_tokens: int) -> dict[str, float]:
    """The last turn of a conversation: a session where the server has them, else the whole sent again in each turn."""
    session = RemoteServer(url).session()
    options = Options(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    for text in texts:
        began, first, finished = time.perf_counter(), 0.0, None
        for piece in session.chat([{"role": "user", "content": text}], options):
            first = first or (time.perf_counter() if piece.text else 0.0)
            finished = piece.finished or finished
        ended = time.perf_counter()
    session.close()
    assert finished is not None
    usage = finished.usage
    return {
        "first_ms": 1e3 * (first - began),
        "tokens_s": usage.completion_tokens / (ended - began),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
    }


def sessions(url: str, num_sessions: int, num_turns: int) -> dict[str, float]:
    """Sessions that each take a turn at once, again and again: late turns over early ones."""
    http = HttpClient(url)
    names = [http.post("/v1/sessions", {})["id"] for _ in range(num_sessions)]

    def turn(name: str, seed: int) -> float:
        began = time.perf_counter()
        body = {**_GREEDY, "input_ids": random_tokens(IN_TOKENS, seed), "max_tokens": OUT_TOKENS}
        http.post(f"/v1/sessions/{name}/generate", body)
        return 1e3 * (time.perf_counter() - began)

    with ThreadPoolExecutor(num_sessions) as clients:
        turns = []
        for number in range(num_turns):
            seeds = range(number * num_sessions, (number + 1) * num_sessions)
            turns.append(statistics.mean(clients.map(turn, names, seeds)))
    for name in names:
        http.ask("DELETE", f"/v1/sessions/{name}")
    early_ms, late_ms = early_and_late(turns)
    return {"early_ms": early_ms, "late_ms": late_ms, "late_over_early": late_ms / early_ms}
