"""What it costs the engine to be watched: `python -m bench.live_frames [--json PATH]`, without a device.

An executor that answers at once stands in for the device. For several numbers of running rows and a pool of 10,000
pages: the host time of a tick with nobody watching and of one while somebody does (medians of ticks without frames,
by turns), of a frame, and of a whole one; a frame's share of the time between frames, and its bytes as JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.host import EOS, VOCAB, Instant
from roost.clock import SystemClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.messages import Event, Frame, GetFrame, Submit
from roost.sched.engine import Engine

NUM_PAGES = 10_000
PAGE_SIZE = 16
PROMPT_LEN = 64
PERIOD_S = 0.25  # between frames
TICKS_BETWEEN = 25  # as many as there are between frames with steps of 10 ms
ROUNDS = 3  # of frames, and of ticks with nobody watching


def _engine(rows: int) -> tuple[Engine, Instant]:
    """An engine whose rows all decode."""
    memory = MemoryConfig(page_size=PAGE_SIZE, pool_tokens=NUM_PAGES * PAGE_SIZE)
    context = PROMPT_LEN + 16 + 4 * ROUNDS * TICKS_BETWEEN
    sched = SchedConfig(context=context, max_running=rows, max_queued=rows, chunk=8192, overlap=True)
    resolved = resolve(EngineConfig(memory=memory, sched=sched), ModelTraits(vocab_size=VOCAB))
    executor = Instant(resolved.spec.accept_max)
    engine, rng = Engine(resolved, executor, SystemClock()), np.random.default_rng(0)
    room = NUM_PAGES * PAGE_SIZE // rows - 2 * PAGE_SIZE
    for number in range(rows):
        tokens = tuple(rng.integers(0, VOCAB, PROMPT_LEN).tolist())
        num_new = min(context, room) - PROMPT_LEN - 1
        submit = Submit(request_id=str(number), tokens=tokens, max_new_tokens=num_new, stop_token_ids=frozenset({EOS}))
        engine.post(submit, lambda event: None)
    while len(engine.state.running) < rows or any(request.in_prefill for request in engine.state.running):
        engine.tick()
    return engine, executor


def _ticks(engine: Engine, executor: Instant) -> list[float]:
    """Host times of some ticks."""
    found = []
    for _ in range(TICKS_BETWEEN):
        before, began = executor.spent, time.perf_counter()
        engine.tick()
        found.append(time.perf_counter() - began - (executor.spent - before))
    return found


def _frame(engine: Engine, *, whole: bool) -> tuple[float, int]:
    """Seconds to build a frame, and its bytes."""
    found: list[Event] = []
    began = time.perf_counter()
    engine.post(GetFrame(whole=whole), found.append)
    engine._receive(engine._mailbox.get())
    spent = time.perf_counter() - began
    (answer,) = found
    assert isinstance(answer, Frame)
    return spent, len(json.dumps(answer.told, separators=(",", ":")))


def measured(rows: int) -> dict[str, Any]:
    """One number of rows."""
    engine, executor = _engine(rows)
    alone, watched, frames, wholes = list[float](), list[float](), list[tuple[float, int]](), list[tuple[float, int]]()
    for _ in range(ROUNDS):
        engine.post(GetFrame(watching=False), lambda event: None)
        engine._receive(engine._mailbox.get())
        alone += _ticks(engine, executor)
        wholes.append(_frame(engine, whole=True))
        watched += _ticks(engine, executor)
        frames.append(_frame(engine, whole=False))
    assert len(engine.state.running) == rows, "a request ended while it was measured"
    frame_s = statistics.median(spent for spent, _ in frames)
    return {
        "rows": rows,
        "tick_us": 1e6 * statistics.median(alone),
        "watched_tick_us": 1e6 * statistics.median(watched),
        "frame_us": 1e6 * frame_s,
        "share_of_period": frame_s / PERIOD_S,
        "frame_bytes": statistics.median(size for _, size in frames),
        "whole_frame_us": 1e6 * statistics.median(spent for spent, _ in wholes),
        "whole_frame_bytes": statistics.median(size for _, size in wholes),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    found = [measured(rows) for rows in args.rows]
    for each in found:
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in each.items()})
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
