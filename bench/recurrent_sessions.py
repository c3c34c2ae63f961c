"""Sessions on recurrent layers: `python -m bench.recurrent_sessions --out FOLDER`. What a turn, a rewind, a fork cost.

Random weights in the shape of Qwen3.5-9B, or of Llama-8B to compare. For histories of some lengths: milliseconds to the
first token of a turn that goes on, of one behind a rewind to a turn's end and to the middle of a turn, and of one in a
fork, with the tokens that were in place (medians); prompt tokens a second; memory of an idle session.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_shapes import DEVICE, SHAPES, RandomState
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.messages import (
    CloseSession,
    Command,
    Event,
    Finished,
    ForkSession,
    GetStats,
    OpenSession,
    Refused,
    RewindSession,
    Stats,
    Submit,
    Tokens,
)
from roost.models.decoder import Decoder
from roost.runner.executor import TorchExecutor
from roost.runner.memory import state_bytes, token_bytes
from roost.sched.engine import Engine
from roost.startup import backend_of, ops_of

IN_TOKENS, OUT_TOKENS = 64, 32
ROOM = 16 * (IN_TOKENS + OUT_TOKENS) + 64  # for turns behind a history
TURNS = 3  # behind the history, before anything is rewound


class Sessions:
    """An engine in this thread, and its sessions."""

    def __init__(self, model: Decoder, context: int, page_size: int) -> None:
        memory = MemoryConfig(page_size=page_size, pool_tokens=4 * context)
        config = EngineConfig(memory=memory, sched=SchedConfig(context=context, max_running=8))
        self.resolved = resolve(config, model.traits, backend_of(config, DEVICE), on_host=DEVICE.type == "cpu")
        self.executor = TorchExecutor(model, self.resolved, DEVICE)
        self.engine = Engine(self.resolved, self.executor, SystemClock())
        self._model, self._generator, self._number = model, torch.Generator().manual_seed(1), 0

    def do(self, command: Command) -> None:
        """Carry a command out."""
        self.engine.post(command, _not_refused)
        while self.engine.has_work:
            self.engine.tick()

    def turn(self, session: str, num_in: int = IN_TOKENS) -> tuple[float, int]:
        """A turn: milliseconds to its first token, and how many tokens were in place."""
        tokens = torch.randint(self._model.config.vocab_size, (num_in,), generator=self._generator).tolist()
        self._number += 1
        name, firsts, ends = str(self._number), list[float](), list[Finished]()

        def hear(event: Event) -> None:
            assert not isinstance(event, Refused), event
            if isinstance(event, Tokens) and not firsts:
                firsts.append(time.perf_counter())
            elif isinstance(event, Finished):
                ends.append(event)

        began = time.perf_counter()
        submit = Submit(request_id=name, tokens=tuple(tokens), max_new_tokens=OUT_TOKENS, session_id=session)
        self.engine.post(submit, hear)
        while self.engine.has_work:
            self.engine.tick()
        return 1e3 * (firsts[0] - began), ends[0].usage.cached_tokens

    def held_bytes(self) -> dict[str, int]:
        """Bytes that are not free, by book: of one session, what it holds and what it left in the prefix cache."""
        per_token = dict(zip(("full", "window"), token_bytes(self._model, None, "auto"), strict=True))
        per_token["inputs"] = sum(kv.token_bytes for kv in self._model.kv if kv.recurs is not None)
        stats = list[Stats]()
        self.engine.post(GetStats(), stats.append)  # type: ignore[arg-type]
        self.engine.tick()
        sizes = {book.name: self.resolved.page_size * per_token[book.name] for book in self.resolved.books}
        return {
            pool.book: (pool.leased + pool.cached) * {**sizes, "states": state_bytes(self._model)}[pool.book]
            for pool in stats[0].pools
        }


def _not_refused(event: Event) -> None:
    assert not isinstance(event, Refused), event


def measured(model: Decoder, history: int, page_size: int, repeats: int) -> Iterator[dict[str, Any]]:
    """The cases of one length of history."""
    sessions = Sessions(model, history + ROOM, page_size)
    times: dict[str, list[tuple[float, int]]] = {}
    idle_bytes: dict[str, int] = {}
    for number in range(repeats + 1):
        cases = _talk(sessions, f"s{number}", history, idle_bytes)
        for case, found in cases.items() if number else ():  # the first one warms up
            times.setdefault(case, []).append(found)
    for case, all_found in times.items():
        yield {
            "history": history,
            "case": case,
            "first_token_ms": statistics.median(each for each, _ in all_found),
            "cached_tokens": statistics.median(each for _, each in all_found),
        }
    whole_ms = statistics.median(each for each, _ in times["whole history"])
    yield {"history": history, "case": "prefill", "tokens_per_s": 1e3 * history / whole_ms}
    yield {"history": history, "case": "memory of an idle session", "bytes": idle_bytes}
    sessions.executor.close()


def _talk(sessions: Sessions, name: str, history: int, idle_bytes: dict[str, int]) -> dict[str, tuple[float, int]]:
    """One session through all cases; what the first one holds of a history is noted."""
    sessions.do(OpenSession(session_id=name))
    cases = {"whole history": sessions.turn(name, history)}
    if not idle_bytes:
        idle_bytes.update(sessions.held_bytes())
    for _ in range(TURNS):
        cases["next turn"] = sessions.turn(name)
    sessions.do(RewindSession(session_id=name, turn=TURNS))
    cases["rewind to a turn's end"] = sessions.turn(name)
    sessions.do(ForkSession(session_id=name, new_id=f"{name} fork"))
    cases["fork"] = sessions.turn(f"{name} fork")
    sessions.do(RewindSession(session_id=name, turn=TURNS))
    cases["rewind behind a fork"] = sessions.turn(name)
    sessions.do(RewindSession(session_id=name, length=history + IN_TOKENS + OUT_TOKENS // 2))
    cases["rewind into a turn"] = sessions.turn(name)
    for each in (name, f"{name} fork"):
        sessions.do(CloseSession(session_id=each))
    return cases


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3.5-9b")
    parser.add_argument("--histories", type=int, nargs="+", default=[500, 4000, 7000, 30000])
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    config = replace(SHAPES[args.shape], context_max=max(args.histories) + ROOM)
    model = Decoder(config, RandomState(config), args.weights, DEVICE, ops_of(backend_of(EngineConfig(), DEVICE)))
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU (rehearsal)"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__, "shape": args.shape, "rows": []}
    for history in args.histories:
        for row in measured(model, history, args.page_size, args.repeats):
            report["rows"].append(row)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                (args.out / f"recurrent_sessions_{args.shape}.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
