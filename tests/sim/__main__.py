"""`python -m tests.sim`: run seeds, or replay one with its event log."""

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from tests.sim.options import draw
from tests.sim.replicas import run_fleet
from tests.sim.report import Report
from tests.sim.world import run_seed


def main() -> int:
    """Run and report; the exit status says whether every seed held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, help="run this one seed and print its event log")
    parser.add_argument("--replicas", action="store_true", help="only replicas, with every seed")
    args = parser.parse_args()
    run = run_fleet if args.replicas else run_seed
    if args.replay is not None:
        return _replay(run, args.replay)
    started = time.monotonic()
    with ProcessPoolExecutor(max_workers=2) as pool:
        reports = list(pool.map(run, range(args.first, args.first + args.seeds), chunksize=4))
    _summary(reports, time.monotonic() - started)
    return 1 if any(report.failure for report in reports) else 0


def _replay(run: Callable[[int, Callable[[str], None]], Report], seed: int) -> int:
    print(draw(seed))
    report = run(seed, print)
    print(report)
    return 1 if report.failure else 0


def _summary(reports: list[Report], seconds: float) -> None:
    failed = [report for report in reports if report.failure]
    for report in failed:
        print(f"seed {report.seed}: {report.failure.splitlines()[0][:300]}")
        print(f"    replay: python -m tests.sim --replay {report.seed}")
    ticks = sum(report.ticks for report in reports)
    print(
        f"ticks {ticks}, requests {sum(r.requests for r in reports)}, tokens {sum(r.tokens for r in reports)}, "
        f"audits passed {sum(r.audits for r in reports)}, {ticks / seconds:.0f} ticks a second"
    )
    counts: dict[str, int] = {}
    for report in reports:
        for what, count in report.counts.items():
            counts[what] = counts.get(what, 0) + count
    print(", ".join(f"{what} {count}" for what, count in sorted(counts.items())))
    print(f"simulation: {len(reports) - len(failed)} passed, {len(failed)} failed")


if __name__ == "__main__":
    sys.exit(main())
