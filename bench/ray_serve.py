"""Replicas on Ray Serve beside a plain server: `python -m bench.ray_serve --json PATH`. One run, side by side.

What Ray's proxy, our ingress and the way to a replica add to the time to first token, at 1 and 32 requests at once;
the throughput of one and of two replicas; with a journal, what the first turn of a session costs on another replica,
and how long sessions of a killed replica do not answer. The plain server stays up and takes turns with each deployment.
Every engine has one thread. Absolute times are this machine's; compare them within one run.
"""

import argparse
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx

from bench.http_load import chat
from bench.processes import Process
from roost.config.options import SessionConfig

Figures = dict[str, Any]
LOADS = {1: 100, 32: 320}  # requests in all, by how many are there at once
ROUNDS = 5
LATENCY_TOKENS = 4
LOAD_TOKENS = 64
SESSIONS = 8
TEXT_WORDS = 512  # a token each, that a session has before it moves
PIN = "x-roost-replica"
ENVIRONMENT = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def first_token_ms(url: str, at_once: int, number: int, mark: str) -> list[float]:
    """Milliseconds to the first token of short questions, so many at once."""
    texts = [f"{mark} {each}: name a colour." for each in range(number)]
    with ThreadPoolExecutor(at_once) as clients:
        done = clients.map(lambda text: chat(url, text, LATENCY_TOKENS), texts)
        return [1e3 * (times.stamps[0][0] - times.began) for times in done]


def tokens_s(url: str, at_once: int, mark: str) -> float:
    """Output tokens a second."""
    texts = [f"{mark} {each}: tell a story." for each in range(2 * at_once)]
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as clients:
        done = list(clients.map(lambda text: chat(url, text, LOAD_TOKENS), texts))
    return sum(times.output_tokens for times in done) / (time.perf_counter() - began)


def compared(urls: dict[str, str]) -> dict[str, Figures]:
    """The figures of servers that take turns, by name; the first round is a warm-up."""
    times: dict[tuple[str, int], list[float]] = {(name, at_once): [] for name in urls for at_once in LOADS}
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(ROUNDS + 1):
        for name, url in urls.items():
            for at_once, count in LOADS.items():
                found = first_token_ms(url, at_once, count // ROUNDS, f"{name} {number} {at_once}")
                times[name, at_once] += found if number else []
            rate = tokens_s(url, max(LOADS), f"{name} {number}")
            rates[name] += [rate] if number else []
    return {
        name: {
            **{f"p50_ms_at_{at_once}": statistics.median(times[name, at_once]) for at_once in LOADS},
            **{f"p99_ms_at_{at_once}": statistics.quantiles(times[name, at_once], n=100)[98] for at_once in LOADS},
            "tokens_s": statistics.median(rates[name]),
        }
        for name in urls
    }


class Sessions:
    """Sessions of a deployment with a journal, moved and bereaved."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)
        self.homes: dict[str, str] = {}
        for _ in range(SESSIONS):
            opened = self._http.post("/v1/sessions", json={})
            self.homes[opened.json()["id"]] = opened.headers[PIN]
        for number, session in enumerate(self.homes):  # of which no prefix cache has anything
            words = random.Random(number).choices(("red", "green", "blue", "black", "white"), k=TEXT_WORDS)
            self._turn(session, text=" ".join(words))

    def _turn(self, session: str, *, text: str = " and", on: str | None = None) -> tuple[httpx.Response, float]:
        """A turn of one token, and its milliseconds."""
        began = time.perf_counter()
        body = {"text": text, "max_tokens": 1, "temperature": 0}
        headers = {} if on is None else {PIN: on}
        answer = self._http.post(f"/v1/sessions/{session}/generate", json=body, headers=headers)
        return answer, 1e3 * (time.perf_counter() - began)

    def moved(self) -> Figures:
        """The median turn where a session is, the first one on another replica, and the next one there."""
        times: dict[str, list[float]] = {"stay_ms": [], "move_ms": [], "next_ms": []}
        for session, home in self.homes.items():
            other = next(each for each in set(self.homes.values()) if each != home)
            for name, replica in (("stay_ms", home), ("move_ms", other), ("next_ms", other)):
                answer, ms = self._turn(session, on=replica)
                assert (answer.status_code, answer.headers[PIN]) == (200, replica), answer.text
                times[name].append(ms)
            self.homes[session] = other
        return {name: statistics.median(each) for name, each in times.items()}

    def bereaved(self) -> Figures:
        """Seconds from a replica's death until each of its sessions has answered, the first and the last."""
        import ray  # noqa: PLC0415 - of the deployment, not of the other figures

        ray.init(address="auto", log_to_driver=False)
        victim = next(iter(self.homes.values()))
        (name,) = [each["name"] for each in ray.util.list_named_actors(True) if each["name"].endswith(f"#{victim}")]
        began = time.perf_counter()
        ray.kill(ray.get_actor(name, namespace="serve"))
        left = [session for session, home in self.homes.items() if home == victim]
        answered: list[float] = []
        while left:
            for session in list(left):
                if self._turn(session)[0].status_code == 200:
                    answered.append(time.perf_counter() - began)
                    left.remove(session)
        ray.shutdown()
        return {"first_s": answered[0], "last_s": answered[-1], "sessions": len(answered)}


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def measure(flags: Sequence[str]) -> Figures:
    """Everything, by what it is."""
    roost = [sys.executable, "-m", "roost", "serve", "--threads", "1", *flags]
    figures: Figures = {}
    with Process([*roost, "--port", "0"]) as plain:
        for replicas in (1, 2):
            port = ["--port", str(free_port()), "--ray", "--replicas", str(replicas)]
            with Process([*roost, *port], environment=ENVIRONMENT) as deployed:
                urls = {"plain": plain.url, f"ray, {replicas}": deployed.url}
                figures[f"beside {replicas}"] = compared(urls)
    if "journal" in {field.name for field in fields(SessionConfig)}:
        with tempfile.TemporaryDirectory() as journal:
            port = ["--port", str(free_port()), "--ray", "--replicas", "2", "--journal", journal]
            with Process([*roost, *port], environment=ENVIRONMENT) as deployed:
                sessions = Sessions(deployed.url)
                figures["move"], figures["death"] = sessions.moved(), sessions.bereaved()
    return figures


def table(figures: Figures) -> str:
    """The figures as Markdown."""
    columns = [*(f"p{p}_ms_at_{at_once}" for at_once in LOADS for p in (50, 99)), "tokens_s"]
    lines = [f"| run | server | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for run, rows in figures.items():
        if run.startswith("beside"):
            for name, row in rows.items():
                lines.append(f"| {run} | {name} | {' | '.join(f'{row[column]:.1f}' for column in columns)} |")
        else:
            lines.append(f"\n{run}: {', '.join(f'{name} {value:.3g}' for name, value in rows.items())}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("flags", nargs="*", help="further flags of every server, after --")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    figures = measure(args.flags)
    print(table(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
