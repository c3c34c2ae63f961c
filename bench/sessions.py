"""Sessions on this machine: `make bench-sessions`, or `python -m bench.sessions --json PATH`. One run, side by side.

Whether a turn costs the same however long the conversation is; a turn's time to first token against sending the whole
conversation again, with and without what the prefix cache has of it; how many idle sessions a full pool holds and what
waking one costs; host time of a turn. Plain and n-gram. Absolute times are this machine's; compare them within one run.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roost.cli.prompts import PROMPTS
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.messages import Command, Event, Finished, OpenSession, Refused, Submit, Tokens
from roost.models.decoder import Decoder
from roost.runner.executor import TorchExecutor
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of
from roost.weights.load import load_decoder, open_source
from roost.weights.pull import find_model

CASES = {"plain": SpecConfig(spec="none"), "ngram": SpecConfig(spec="ngram", spec_steps=4)}
IN_TOKENS, OUT_TOKENS = 16, 8
IDLE_TOKENS = 256  # history of each idle session
IDLE_POOL = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What is measured."""

    model: Decoder
    device: torch.device
    text: tuple[int, ...]  # tokens that inputs are cut from


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """One request, and when what came back."""

    posted: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    ended: float = 0.0
    cached: int = 0

    def hear(self, event: Event) -> None:
        """Take an event."""
        assert not isinstance(event, Refused), event
        now = time.perf_counter()
        if isinstance(event, Tokens) and not self.first:
            self.first = now
        elif isinstance(event, Finished):
            self.ended, self.cached = now, event.usage.cached_tokens

    @property
    def first_ms(self) -> float:
        """Time to the first token."""
        return 1e3 * (self.first - self.posted)


class Desk:
    """An engine in this thread, with the CPU time of everything that is not the executor."""

    def __init__(self, parts: Parts, spec: SpecConfig, pool_tokens: int, context: int, max_running: int = 8) -> None:
        config = EngineConfig(
            memory=MemoryConfig(pool_tokens=pool_tokens),
            sched=SchedConfig(context=context, max_running=max_running),
            spec=spec,
        )
        resolved = resolve(config, parts.model.traits, backend_of(config, parts.device))
        self.executor = TorchExecutor(parts.model, resolved, parts.device)
        self.engine = Engine(resolved, self.executor, SystemClock())
        self.host_s, self._executor_s = 0.0, 0.0
        self.executor.launch = self._timed(self.executor.launch)  # type: ignore[method-assign]
        self.executor.collect = self._timed(self.executor.collect)  # type: ignore[method-assign]
        self._text, self._at, self._num_asked = parts.text, 0, 0

    def tokens(self, number: int) -> tuple[int, ...]:
        """The next tokens of the text, which goes round."""
        self._at = (self._at + 7) % len(self._text)
        return tuple(self._text[(self._at + index) % len(self._text)] for index in range(number))

    def ask(self, tokens: Sequence[int], num_new: int, session: str | None = None, cache_salt: str = "") -> Asked:
        """Post a request."""
        self._num_asked += 1
        submit = Submit(
            request_id=str(self._num_asked),
            tokens=tuple(tokens),
            max_new_tokens=num_new,
            session_id=session,
            cache_salt=cache_salt,
        )
        asked = Asked()
        self.engine.post(submit, asked.hear)
        return asked

    def tell(self, command: Command) -> None:
        """Post a command and have it carried out."""
        self.engine.post(command, lambda event: None)
        self.run()

    def run(self) -> None:
        """Tick until nothing is left to do."""
        while self.engine.has_work:
            began, executor_s = time.thread_time(), self._executor_s
            self.engine.tick()
            self.host_s += time.thread_time() - began - (self._executor_s - executor_s)

    def turn(self, session: str, num_in: int, num_new: int) -> Asked:
        """One turn, alone, to its end."""
        asked = self.ask(self.tokens(num_in), num_new, session)
        self.run()
        return asked

    def close(self) -> None:
        """End the executor."""
        self.executor.close()

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            result = function(*args)
            self._executor_s += time.thread_time() - began
            return result

        return timed


# --- what is measured --------------------------------------------------------------------------------------------


def flat(parts: Parts, spec: SpecConfig, num_sessions: int, num_turns: int) -> dict[str, Any]:
    """Latency and host time of turns, late ones over early ones, with all sessions at once."""
    length = num_turns * (IN_TOKENS + OUT_TOKENS) + 64
    desk = Desk(parts, spec, num_sessions * (length + 64), length, num_sessions)
    names = [f"s{number}" for number in range(num_sessions)]
    for name in names:
        desk.tell(OpenSession(session_id=name))
    latencies_ms, hosts_us = [], []
    for _ in range(num_turns):
        host_s = desk.host_s
        asked = [desk.ask(desk.tokens(IN_TOKENS), OUT_TOKENS, name) for name in names]
        desk.run()
        latencies_ms.append(statistics.mean(1e3 * (each.ended - each.posted) for each in asked))
        hosts_us.append(1e6 * (desk.host_s - host_s) / num_sessions)
    desk.close()
    early_ms, late_ms = early_and_late(latencies_ms)
    early_us, late_us = early_and_late(hosts_us)
    return {
        "early_ms": early_ms,
        "late_ms": late_ms,
        "late_over_early": late_ms / early_ms,
        "host_us_early": early_us,
        "host_us_late": late_us,
        "host_late_over_early": late_us / early_us,
    }


def early_and_late(turns: Sequence[float]) -> tuple[float, float]:
    """Means over turns 2 to 11 and over the last ten."""
    return statistics.mean(turns[1:11]), statistics.mean(turns[-10:])


def first_token(parts: Parts, spec: SpecConfig, history: int, repeats: int) -> dict[str, Any]:
    """A turn's time to first token after `history` tokens: as a session, and with everything sent again."""
    context = history + 64 * (repeats + 2)
    desk = Desk(parts, spec, 3 * context, context)
    desk.tell(OpenSession(session_id="s"))
    desk.turn("s", history, 0)
    session = [desk.turn("s", IN_TOKENS, OUT_TOKENS) for _ in range(repeats)]
    said = desk.tokens(history)
    desk.ask(said, 1)
    desk.run()
    cached, again = [], []
    for number in range(repeats):
        cached.append(desk.ask(said + desk.tokens(IN_TOKENS), OUT_TOKENS))
        desk.run()
        if number == 0:  # once is enough: it takes as long as the whole prompt does
            again.append(desk.ask(said + desk.tokens(IN_TOKENS), OUT_TOKENS, cache_salt=str(number)))
            desk.run()
    desk.close()
    session_ms, cached_ms, again_ms = (
        statistics.median(each.first_ms for each in asked) for asked in (session, cached, again)
    )
    return {
        "history": history,
        "session_ms": session_ms,
        "resent_cached_ms": cached_ms,
        "resent_ms": again_ms,
        "cached_over_session": cached_ms / session_ms,
        "resent_over_session": again_ms / session_ms,
    }


def idle(parts: Parts, spec: SpecConfig, pool_tokens: int, repeats: int) -> dict[str, Any]:
    """Idle sessions that a full pool holds, and the cost of the next turn of one: resident, reclaimed, evicted."""
    desk = Desk(parts, spec, pool_tokens, 2 * IDLE_TOKENS, 1)
    number = 2 * pool_tokens // IDLE_TOKENS
    for name in range(number):
        desk.tell(OpenSession(session_id=str(name)))
        desk.turn(str(name), IDLE_TOKENS - OUT_TOKENS, OUT_TOKENS)
    sessions = desk.engine.state.sessions
    held = sum(session.lease is not None for session in sessions.table.values())
    free = desk.engine.state.store.ledger.num_free(0) * desk.engine.state.resolved.page_size
    woken: dict[str, list[Asked]] = {"resident": [], "reclaimed": [], "evicted": []}
    for each in range(repeats):  # the pool stays full: whoever grows takes pages from the least recently used
        name = str(number - 1 - each)
        woken["resident"].append(desk.turn(name, IN_TOKENS, 1))
        sessions.reclaim(sessions.table[name])
        woken["reclaimed"].append(desk.turn(name, IN_TOKENS, 1))
        woken["evicted"].append(desk.turn(str(each), IN_TOKENS, 1))  # reclaimed first, and long ago
    desk.close()
    times = {how: statistics.median(each.first_ms for each in asked) for how, asked in woken.items()}
    return {
        "pool_tokens": pool_tokens,
        "open": number,
        "resident": held,
        "free_tokens": free,
        "tokens_each": IDLE_TOKENS,
        **{f"wake_{how}_ms": ms for how, ms in times.items()},
        **{f"wake_{how}_cached": statistics.median(each.cached for each in asked) for how, asked in woken.items()},
        "reclaimed_over_resident": times["reclaimed"] / times["resident"],
        "evicted_over_resident": times["evicted"] / times["resident"],
    }


def measure(parts: Parts, spec: SpecConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, for one drafter; prints as it goes."""
    name = spec.spec
    found = flat(parts, spec, args.sessions, args.turns)
    print(
        f"{name}: {args.sessions} sessions, {args.turns} turns: {found['early_ms']:.1f} ms early, "
        f"{found['late_ms']:.1f} late, ratio {found['late_over_early']:.2f}; host us a turn "
        f"{found['host_us_early']:.0f} early, {found['host_us_late']:.0f} late, "
        f"ratio {found['host_late_over_early']:.2f}",
        flush=True,
    )
    firsts = []
    for history in args.histories:
        firsts.append(first_token(parts, spec, history, args.repeats))
        row = firsts[-1]
        print(
            f"{name}: first token after {history}: session {row['session_ms']:.0f} ms, "
            f"sent again {row['resent_ms']:.0f} ({row['resent_over_session']:.1f} x), "
            f"cached {row['resent_cached_ms']:.0f} "
            f"({row['cached_over_session']:.2f} x)",
            flush=True,
        )
    row = idle(parts, spec, args.idle_pool, args.repeats)
    print(
        f"{name}: {row['resident']} of {row['open']} idle sessions of {row['tokens_each']} tokens in a pool of "
        f"{row['pool_tokens']}; waking one: resident {row['wake_resident_ms']:.0f} ms, reclaimed "
        f"{row['wake_reclaimed_ms']:.0f} ({row['reclaimed_over_resident']:.2f} x), evicted "
        f"{row['wake_evicted_ms']:.0f} ({row['evicted_over_resident']:.1f} x)",
        flush=True,
    )
    return {"flat": found, "first_token": firsts, "idle": row}


def load(args: argparse.Namespace) -> Parts:
    """The default model, and text to cut inputs from."""
    device = torch.device("cuda" if torch.accelerator.is_available() else "cpu")
    source = open_source(find_model(args.model)[1])
    weights, ops = "int8" if device.type == "cpu" else "bf16", ops_of(backend_of(EngineConfig(), device))
    model = load_decoder(source, weights=weights, device=device, ops=ops)
    language = source.language()
    texts = [language.chat_tokens([{"role": "user", "content": text}]) for text in PROMPTS]
    return Parts(model=model, device=device, text=tuple(token for text in texts for token in text))


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--spec", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--histories", type=int, nargs="+", default=[500, 2000, 7000])
    parser.add_argument("--idle-pool", type=int, default=IDLE_POOL)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    with ThreadPoolExecutor(max_workers=1) as loader:  # on a thread that ends, as at start-up
        parts = loader.submit(load, args).result()
    print(f"{parts.device}, {torch.get_num_threads()} threads", flush=True)
    report: dict[str, Any] = {"device": str(parts.device), "threads": torch.get_num_threads()}
    for name in args.spec:
        report[name] = measure(parts, CASES[name], args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
