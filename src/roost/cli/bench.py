"""Measure a running server, or an engine in this process: throughput, latencies, cache hits, accepted drafts.

Prompts come from a file (JSON lines with a `prompt`, or plain lines) or are the project's own. Each run uses a cache
salt of its own, so none finds what an earlier one left in the prefix cache. Prints a table, and writes JSON if asked
for. Figures are only as good as the machine was quiet. Called by `main`.
"""

import json
import secrets
import statistics
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from roost.cli.config_file import add_config, completed
from roost.cli.flag_parser import add_engine, check_no_engine, engine_of
from roost.cli.http_client import HttpClient, NotJson
from roost.cli.prompts import PROMPTS, read_turns
from roost.errors import ConfigError, RequestError
from roost.front import speculation
from roost.front.options import Options
from roost.library.llm import LLM
from roost.messages import SpecStats
from roost.terminal import counting_bar, download_bar

EXAMPLES = """\
  roost bench                                              the default model in this process
  roost bench --url http://127.0.0.1:8000 --concurrency 8  a server that runs already
  roost bench --prompts questions.jsonl --requests 100 --json out.json"""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--url",
        default=None,
        help="a running server, whose key is in $ROOST_API_KEY; an engine in this process if absent",
    )
    parser.add_argument(
        "--prompts", type=Path, default=None, metavar="FILE", help="a file; the project's own prompts if absent"
    )
    parser.add_argument("--requests", type=int, metavar="N", default=32, help="requests of each run (default: 32)")
    parser.add_argument(
        "--concurrency", default="1,4,8", metavar="N,N,…", help="requests at once, one run each (default: 1,4,8)"
    )
    parser.add_argument("--new-tokens", type=int, metavar="N", default=64, help="tokens of each answer (default: 64)")
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", default=None, help="repeat each prompt to about this many words"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the results there too")
    add_config(parser)
    add_engine(parser)


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """One request: when its tokens arrived, and its usage."""

    began: float = 0.0
    # (time, tokens that arrived then; a server's chunk counts as one)
    stamps: list[tuple[float, int]] = field(default_factory=list)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """The results at one concurrency."""

    concurrency: int
    requests: int
    output_tokens_s: float
    prompt_tokens_s: float
    first_token_s_p50: float
    first_token_s_p99: float
    between_ms_p50: float
    between_ms_p99: float
    cached_share: float
    wall_s: float
    spec: SpecStats  # of this run; zeros where nothing is drafted, or the server does not report it

    def as_json(self) -> dict[str, Any]:
        """The results for a file."""
        return {**asdict(self), "spec": speculation.as_json(self.spec)}


class BenchTarget(Protocol):
    """What is measured."""

    def ask(self, prompt: str, salt: str) -> RequestTimes:
        """Run one request to its end; it shares no cached prefix with requests of another salt."""
        ...

    def spec(self) -> SpecStats:
        """Speculation's counters since the start."""
        ...


class EngineTarget:
    """An engine in this process."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self._llm = llm
        self._options = options

    def ask(self, prompt: str, salt: str) -> RequestTimes:
        """Run one request to its end."""
        times = RequestTimes(began=time.perf_counter())
        options = replace(self._options, cache_salt=salt)
        for piece in self._llm.stream_chat([{"role": "user", "content": prompt}], options):
            if piece.tokens:
                times.stamps.append((time.perf_counter(), len(piece.tokens)))
            if piece.finished is not None:
                times.output_tokens = piece.finished.usage.completion_tokens
                times.prompt_tokens = piece.finished.usage.prompt_tokens
                times.cached_tokens = piece.finished.usage.cached_tokens
        return times

    def spec(self) -> SpecStats:
        """Speculation's counters since the start."""
        return self._llm.stats().spec


class ServerTarget:
    """A server that speaks OpenAI's API."""

    def __init__(self, url: str, new_tokens: int, temperature: float) -> None:
        self._http = HttpClient(url)
        self._body = {
            "model": "default",
            "max_tokens": new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._has_salts = self._counters() is not None  # a Roost server; others get different texts instead of a salt

    def ask(self, prompt: str, salt: str) -> RequestTimes:
        """Run one request to its end."""
        times = RequestTimes(began=time.perf_counter())
        fresh = {"cache_salt": salt} if self._has_salts else {}
        text = prompt if self._has_salts else f"[{salt}] {prompt}"
        body = {**self._body, **fresh, "messages": [{"role": "user", "content": text}]}
        for chunk in self._http.stream("/v1/chat/completions", body):
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                times.stamps.append((time.perf_counter(), 1))
            if chunk.get("usage"):
                usage = chunk["usage"]
                times.output_tokens, times.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                times.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return times

    def spec(self) -> SpecStats:
        """Speculation's counters since the start, other clients included; zeros if the server does not report any."""
        return self._counters() or SpecStats()

    def _counters(self) -> SpecStats | None:
        try:
            return speculation.from_json(self._http.get("/server_info")["stats"]["spec"])
        except (RequestError, NotJson, KeyError, TypeError):
            return None  # not a Roost server


def run(args: Namespace) -> int:
    """Measure every concurrency and print the table."""
    prompts = _prompts(args)
    levels = _levels(args.concurrency)
    if args.requests < 1 or args.new_tokens < 1:
        raise ConfigError("--requests and --new-tokens must be at least 1")
    if args.url is not None:
        check_no_engine(args)
        server = ServerTarget(args.url, args.new_tokens, args.temperature)
        return _report([measure(server, prompts, args, n) for n in levels], args)
    options = Options(max_new_tokens=args.new_tokens, temperature=args.temperature, ignore_eos=True)
    with download_bar() as progress:
        llm = LLM(config=engine_of(completed(args)), progress=progress)
    with llm:
        return _report([measure(EngineTarget(llm, options), prompts, args, n) for n in levels], args)


def measure(target: BenchTarget, prompts: list[str], args: Namespace, concurrency: int) -> BenchRun:
    """One run: `concurrency` clients, each of which takes the next prompt as soon as it is done."""
    with counting_bar(f"{concurrency} at once", args.requests) as progress:
        return _measured(target, prompts, args, concurrency, progress)


def _measured(
    target: BenchTarget, prompts: list[str], args: Namespace, concurrency: int, progress: Callable[[int], None]
) -> BenchRun:
    salt = secrets.token_hex(4)
    work: SimpleQueue[int] = SimpleQueue()
    for number in range(args.requests):
        work.put(number)
    done: list[RequestTimes] = []
    errors: list[BaseException] = []

    def client() -> None:
        try:
            while True:
                number = work.get_nowait()
                done.append(target.ask(prompts[number % len(prompts)], salt))
                progress(len(done))
        except Empty:
            pass
        except Exception as error:  # noqa: BLE001 (raised again below, on the main thread)
            errors.append(error)

    before = target.spec()
    began = time.perf_counter()
    threads = [threading.Thread(target=client, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    wall_s = time.perf_counter() - began
    return _summary(done, concurrency, wall_s, speculation.since(before, target.spec()))


def _summary(done: list[RequestTimes], concurrency: int, wall_s: float, spec: SpecStats) -> BenchRun:
    firsts = [times.stamps[0][0] - times.began for times in done if times.stamps]
    gaps = [
        (after - before) / count * 1000
        for times in done
        for (before, _), (after, count) in zip(times.stamps, times.stamps[1:], strict=False)
    ]
    prompt_tokens = sum(times.prompt_tokens for times in done)
    return BenchRun(
        concurrency=concurrency,
        requests=len(done),
        output_tokens_s=sum(times.output_tokens for times in done) / wall_s,
        prompt_tokens_s=prompt_tokens / wall_s,
        first_token_s_p50=_percentile(firsts, 50),
        first_token_s_p99=_percentile(firsts, 99),
        between_ms_p50=_percentile(gaps, 50),
        between_ms_p99=_percentile(gaps, 99),
        cached_share=sum(times.cached_tokens for times in done) / max(prompt_tokens, 1),
        wall_s=wall_s,
        spec=spec,
    )


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _report(runs: list[BenchRun], args: Namespace) -> int:
    table = Table(title=f"{args.requests} requests of {args.new_tokens} tokens, {args.url or 'in this process'}")
    for heading in ("at once", "out tok/s", "prompt tok/s", "first p50 s", "p99", "between p50 ms", "p99", "cached"):
        table.add_column(heading, justify="right")
    for each in runs:
        numbers = (each.output_tokens_s, each.prompt_tokens_s)
        times = (each.first_token_s_p50, each.first_token_s_p99, each.between_ms_p50, each.between_ms_p99)
        cells = [f"{number:.1f}" for number in numbers] + [f"{number:.3g}" for number in times]
        table.add_row(str(each.concurrency), *cells, f"{each.cached_share:.0%}")
    Console(file=sys.stdout).print(table)
    for each in runs:  # not in the table, which is as wide as a terminal already
        if each.spec.drafts_offered:
            length = f"{each.concurrency} at once: accept length {each.spec.accept_length:.2f}"
            print(f"{length}, rounds by accept length from 1:", *each.spec.histogram)
        if each.spec.lookup_rounds:
            share = f"{each.spec.lookup_share:.0%} of the accepted drafts"
            print(f"  looked up: {each.spec.lookup_rounds} of {each.spec.rounds} rounds, {share}")
    if args.json is not None:
        args.json.write_text(json.dumps([each.as_json() for each in runs], indent=1) + "\n")
    return 0


def _prompts(args: Namespace) -> list[str]:
    prompts = list(PROMPTS) if args.prompts is None else [turns[0] for turns in read_turns(args.prompts)]
    if args.prompt_tokens is None:
        return prompts
    return [" ".join((each.split() * args.prompt_tokens)[: args.prompt_tokens]) for each in prompts]


def _levels(text: str) -> list[int]:
    try:
        levels = [int(each) for each in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--concurrency must be numbers separated by commas, got {text}") from error
    if min(levels) < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {text}")
    return levels
