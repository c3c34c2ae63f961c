"""Measure a running server, or an engine in this process: throughput, times, cache hits, accepted drafts.

Prompts come from a file (one JSON object with `prompt` a line, or plain lines) or are those that come with the project.
Each run has prompts of its own: none finds in the prefix cache what an earlier one has left there. Prints a table, and
JSON if asked for. Numbers of one run, side by side; no run is better than the machine was quiet. Called by `main`.
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

from roost.cli.api import Api, NotJson
from roost.cli.flags import add_engine, check_no_engine, engine_of
from roost.cli.prompts import PROMPTS, read_turns
from roost.errors import ConfigError, RequestError
from roost.front import speculation
from roost.front.options import Options
from roost.library.llm import LLM
from roost.messages import SpecStats
from roost.terminal import counting_bar, loading_bar

EXAMPLES = """\
  roost bench                                              the default model in this process
  roost bench --url http://127.0.0.1:8000 --concurrency 8  a server that runs already
  roost bench --prompts questions.jsonl --requests 100 --json out.json"""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "--url",
        default=None,
        help="a running server, with the key in $ROOST_API_KEY; an engine in this process if absent",
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
    add_engine(parser)


@dataclass(slots=True, kw_only=True)
class Times:
    """One request: when its tokens came, and what it used."""

    began: float = 0.0
    stamps: list[tuple[float, int]] = field(
        default_factory=list
    )  # (time, tokens that came then, as far as one can see)
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The results of one concurrency."""

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
    spec: SpecStats  # of this run; zeros where nothing is drafted, or nothing is known of it

    def as_json(self) -> dict[str, Any]:
        """The results for a file."""
        return {**asdict(self), "spec": speculation.as_json(self.spec)}


class Target(Protocol):
    """What is measured."""

    def ask(self, prompt: str, mark: str) -> Times:
        """One request, to its end; it finds nothing cached that was asked for under another mark."""
        ...

    def spec(self) -> SpecStats:
        """Speculation's sums since the start."""
        ...


class InProcess:
    """An engine in this process."""

    def __init__(self, llm: LLM, options: Options) -> None:
        self._llm = llm
        self._options = options

    def ask(self, prompt: str, mark: str) -> Times:
        """One request, to its end."""
        times = Times(began=time.perf_counter())
        options = replace(self._options, cache_salt=mark)
        for piece in self._llm.stream_chat([{"role": "user", "content": prompt}], options):
            if piece.tokens:
                times.stamps.append((time.perf_counter(), len(piece.tokens)))
            if piece.finished is not None:
                times.output_tokens = piece.finished.usage.completion_tokens
                times.prompt_tokens = piece.finished.usage.prompt_tokens
                times.cached_tokens = piece.finished.usage.cached_tokens
        return times

    def spec(self) -> SpecStats:
        """Speculation's sums since the start."""
        return self._llm.stats().spec


class Server:
    """A server that speaks OpenAI's API."""

    def __init__(self, url: str, new_tokens: int, temperature: float) -> None:
        self._api = Api(url)
        self._body = {
            "model": "default",
            "max_tokens": new_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._has_salts = self._sums() is not None  # one of ours; others need other texts

    def ask(self, prompt: str, mark: str) -> Times:
        """One request, to its end."""
        times = Times(began=time.perf_counter())
        fresh = {"cache_salt": mark} if self._has_salts else {}
        text = prompt if self._has_salts else f"[{mark}] {prompt}"
        body = {**self._body, **fresh, "messages": [{"role": "user", "content": text}]}
        for chunk in self._api.stream("/v1/chat/completions", body):
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                times.stamps.append((time.perf_counter(), 1))
            if chunk.get("usage"):
                usage = chunk["usage"]
                times.output_tokens, times.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                times.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return times

    def spec(self) -> SpecStats:
        """Speculation's sums since the start, other clients' too; a server that does not say them has none."""
        return self._sums() or SpecStats()

    def _sums(self) -> SpecStats | None:
        try:
            return speculation.from_json(self._api.get("/server_info")["stats"]["spec"])
        except (RequestError, NotJson, KeyError, TypeError):
            return None  # not one of ours


def run(args: Namespace) -> int:
    """Measure every concurrency and print the table."""
    prompts = _prompts(args)
    levels = _levels(args.concurrency)
    if args.requests < 1 or args.new_tokens < 1:
        raise ConfigError("--requests and --new-tokens must be at least 1")
    if args.url is not None:
        check_no_engine(args)
        server = Server(args.url, args.new_tokens, args.temperature)
        return _report([measure(server, prompts, args, n) for n in levels], args)
    options = Options(max_new_tokens=args.new_tokens, temperature=args.temperature, ignore_eos=True)
    with loading_bar() as progress:
        llm = LLM(config=engine_of(args), progress=progress)
    with llm:
        return _report([measure(InProcess(llm, options), prompts, args, n) for n in levels], args)


def measure(target: Target, prompts: list[str], args: Namespace, concurrency: int) -> Run:
    """One run: `concurrency` clients that take the next prompt as soon as they are done."""
    with counting_bar(f"{concurrency} at once", args.requests) as told:
        return _measured(target, prompts, args, concurrency, told)


def _measured(
    target: Target, prompts: list[str], args: Namespace, concurrency: int, told: Callable[[int], None]
) -> Run:
    mark = secrets.token_hex(4)
    work: SimpleQueue[int] = SimpleQueue()
    for number in range(args.requests):
        work.put(number)
    done: list[Times] = []
    errors: list[BaseException] = []

    def client() -> None:
        try:
            while True:
                number = work.get_nowait()
                done.append(target.ask(prompts[number % len(prompts)], mark))
                told(len(done))
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


def _summary(done: list[Times], concurrency: int, wall_s: float, spec: SpecStats) -> Run:
    firsts = [times.stamps[0][0] - times.began for times in done if times.stamps]
    gaps = [
        (after - before) / count * 1000
        for times in done
        for (before, _), (after, count) in zip(times.stamps, times.stamps[1:], strict=False)
    ]
    prompt_tokens = sum(times.prompt_tokens for times in done)
    return Run(
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


def _report(runs: list[Run], args: Namespace) -> int:
    table = Table(title=f"{args.requests} requests of {args.new_tokens} tokens, {args.url or 'in this process'}")
    for heading in ("at once", "out tok/s", "prompt tok/s", "first p50 s", "p99", "between p50 ms", "p99", "cached"):
        table.add_column(heading, justify="right")
    for each in runs:
        numbers = (each.output_tokens_s, each.prompt_tokens_s)
        times = (each.first_token_s_p50, each.first_token_s_p99, each.between_ms_p50, each.between_ms_p99)
        cells = [f"{number:.1f}" for number in numbers] + [f"{number:.3g}" for number in times]
        table.add_row(str(each.concurrency), *cells, f"{each.cached_share:.0%}")
    Console(file=sys.stdout).print(table)
    for each in runs:  # not columns: the table is as wide as a terminal
        if each.spec.drafts_offered:
            length = f"{each.concurrency} at once: accept length {each.spec.accept_length:.2f}"
            print(f"{length}, rounds by accept length from 1:", *each.spec.histogram)
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
        raise ConfigError(f"--concurrency must be numbers with commas between them, got {text}") from error
    if min(levels) < 1:
        raise ConfigError(f"--concurrency must be at least 1, got {text}")
    return levels
