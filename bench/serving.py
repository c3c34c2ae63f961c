"""The default model on this machine: `make bench-serving`. One run, everything side by side.

In this process: decode and prefill rates, time to first token, and the share of a step that is not the model, for int8
and fp32 weights. Then a real server: start time, resident size after load and after many requests, idle CPU. Prints
tables and, with --json PATH, writes the same numbers. Absolute times are this machine's; compare them within one run.
"""

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.processes import Process
from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SpecConfig
from roost.messages import Event, Submit, Tokens
from roost.startup import Running, start

NEW_TOKENS = 64
PROMPT_LEN = 32
PREFILL_LEN = 1024


class Timer:
    """Seconds spent in some functions."""

    def __init__(self) -> None:
        self.spent = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            self.spent += time.perf_counter() - began
            return result

        return timed


def decode(running: Running, at_once: int, timer: Timer) -> dict[str, float]:
    """Rate of `at_once` requests that decode together, and how much of it was not the model."""
    engine, stamps = running.engine, []
    firsts: list[float] = []

    def reply(event: Event) -> None:
        if isinstance(event, Tokens):
            stamps.append(time.perf_counter())

    began = time.perf_counter()
    for number in range(at_once):
        engine.post(Submit(request_id=str(number), tokens=_prompt(PROMPT_LEN), max_new_tokens=NEW_TOKENS), reply)
    while len(stamps) < at_once and engine.has_work:
        engine.tick()
    firsts.append(stamps[0] - began)
    timer.spent, start_s, before = 0.0, time.perf_counter(), len(stamps)
    while engine.has_work:
        engine.tick()
    wall_s = time.perf_counter() - start_s
    return {
        "tokens_s": (len(stamps) - before) / wall_s,
        "first_token_s": firsts[0],
        "not_model_share": 1 - timer.spent / wall_s,
    }


def prefill(running: Running) -> float:
    """Prompt tokens a second of one long prompt."""
    running.engine.post(Submit(request_id="long", tokens=_prompt(PREFILL_LEN), max_new_tokens=1), lambda event: None)
    began = time.perf_counter()
    while running.engine.has_work:
        running.engine.tick()
    return PREFILL_LEN / (time.perf_counter() - began)


def _prompt(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(100, 40_000, (length,)).tolist())


def in_process(weights: str, threads: int, repeats: int) -> dict[str, Any]:
    """Medians of a few repetitions, one form of the weights."""
    config = EngineConfig(
        model=ModelConfig(weights=weights, threads=threads),
        memory=MemoryConfig(pool_tokens=16384),
        sched=SchedConfig(context=4096),
        spec=SpecConfig(spec="none"),
    )
    running = start(config)
    timer, model = Timer(), running.executor.runner.passes.model
    model.forward = timer.wrap(model.forward)  # type: ignore[method-assign]
    model.logits = timer.wrap(model.logits)  # type: ignore[method-assign]
    decode(running, 1, timer)  # warm
    levels = {
        str(at_once): _median([decode(running, at_once, timer) for _ in range(repeats)]) for at_once in (1, 4, 8, 32)
    }
    rate = statistics.median(prefill(running) for _ in range(repeats))
    running.executor.close()
    return {"weights": weights, "decode": levels, "prefill_tokens_s": rate, "load_s": running.load_s}


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


# --- a real server ---------------------------------------------------------------------------------------------


def server(num_requests: int, threads: int) -> dict[str, Any]:
    """Start time, sizes and idle CPU of a server with default settings."""
    command = [sys.executable, "-m", "roost", "serve", "--port", "0", "--threads", str(threads)]
    with Process(command) as process:
        after_load = process.resident_mb()
        for number in range(num_requests):
            _ask(process.url, f"Say the number {number} in words.")
        after_requests = process.resident_mb()
        cpu = process.cpu_s()
        time.sleep(10)
        idle_share = (process.cpu_s() - cpu) / 10
    return {
        "start_s": process.ready_s,
        "resident_mb_after_load": after_load,
        "resident_mb_after_requests": after_requests,
        "num_requests": num_requests,
        "idle_cpu_share": idle_share,
    }


def _ask(url: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"threads": args.threads, "forms": []}
    for weights in ("int8", "fp32"):
        found = in_process(weights, args.threads, args.repeats)
        report["forms"].append(found)
        for at_once, run in found["decode"].items():
            rate, first_ms, rest = run["tokens_s"], run["first_token_s"] * 1e3, run["not_model_share"]
            line = f"{weights} {at_once:>2} at once: {rate:7.1f} tok/s, first {first_ms:6.0f} ms"
            print(f"{line}, not the model {rest:.1%}", flush=True)
        print(
            f"{weights} prefill: {found['prefill_tokens_s']:.0f} tok/s; loaded in {found['load_s']:.1f} s", flush=True
        )
    report["server"] = server(args.requests, args.threads)
    print(json.dumps(report["server"], indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
