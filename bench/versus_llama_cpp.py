"""Roost beside llama.cpp on this machine's CPU: `python -m bench.versus_llama_cpp --prompts FILE --out FOLDER`.

The same GGUF, the same threads, over HTTP with streaming; Roost without drafts (plain) and as it is by default (head).
Engines take turns: all of a part's are up, one is asked, the others are idle; what the idle ones and other programs
used of the CPU meanwhile is said, and --again repeats what was disturbed. The first round of each part is a warm-up;
figures are medians of the others, and a ratio is the median of the ratios within a round, so that a busy machine is
busy for all. Several --tree or --roost-args are measured side by side.
"""

import argparse
import itertools
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import http_load, llama_cpp
from bench.processes import Process, cores_busy_s
from bench.sessions import IN_TOKENS, OUT_TOKENS
from roost.cli.prompts import PROMPTS, read_turns
from roost.environment import cache_folder
from roost.errors import ConfigError
from roost.weights.load import open_source
from roost.weights.pull import default_model

Figures = dict[str, float]
RIVAL = "llama.cpp"
SETTINGS: dict[str, list[str]] = {"plain": ["--spec", "none"], "head": []}
LOADS = {"one": 1, "four": 4, "eight": 8, "thirtytwo": 32}  # requests at once, by part
PARTS = (*LOADS, "prefill", "turn", "sessions", "start")
PREFILL_LENS = (512, 2000)
TURNS = 10  # of the conversation whose last turn is measured
IDLE_CORES_MAX = 0.05  # more than this, of engines that are not asked, is reported
OTHER_CORES_MAX = 0.1  # more than this, of other programs, is reported and makes a measurement be repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Something to start and ask."""

    name: str
    setting: str  # RIVAL, or a key of SETTINGS
    command: Callable[["Shape"], list[str]]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a part asks of an engine; Roost has its own defaults but for `roost_flags`."""

    slots: int
    context: int  # tokens of each slot
    roost_flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the table: what is shown of a part."""

    part: str
    key: str
    title: str
    is_time: bool = False  # less is better; the ratio is then llama.cpp's over Roost's
    is_limit: bool = False  # an aim is the most that the figure itself may be, not the least ratio to llama.cpp's
    aims: dict[str, float] = field(default_factory=dict)  # by setting


FIGURES = (
    Figure(part="one", key="tokens_s", title="1 at once, tok/s", aims={"plain": 1.2, "head": 2.0}),
    Figure(part="four", key="tokens_s", title="4 at once, tok/s"),
    Figure(part="eight", key="tokens_s", title="8 at once, tok/s", aims={"head": 4.0}),
    Figure(part="thirtytwo", key="tokens_s", title="32 at once, tok/s"),
    *(
        Figure(part="prefill", key=f"{number}_tokens_s", title=f"prefill of {number:,}, tok/s", aims={"head": 3.0})
        for number in PREFILL_LENS
    ),
    Figure(part="turn", key="first_ms", title=f"first token of turn {TURNS}, ms", is_time=True),
    Figure(part="turn", key="tokens_s", title=f"turn {TURNS}, tok/s"),
    Figure(
        part="sessions",
        key="late_over_early",
        title="late turns over early",
        is_time=True,
        is_limit=True,
        aims={"plain": 2.0, "head": 2.0},
    ),
    Figure(part="start", key="cold_s", title="first token after a cold start, s", is_time=True),
    Figure(part="start", key="warm_s", title="first token after a warm start, s", is_time=True),
)


class Texts:
    """Questions that no prompt cache has seen: each is asked once, with a number of its own before it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def some(self, count: int, part: str, number: int) -> list[str]:
        """`count` of them for one round of a part, the same for all engines."""
        first = 1 + PARTS.index(part) * 1_000_000 + number * 1_000
        return [f"{at}. {self._texts[at % len(self._texts)]}" for at in range(first, first + count)]

    def longest(self) -> int:
        """Tokens of the longest question, as a chat."""
        language = open_source(default_model()).language()
        chats = [[{"role": "user", "content": f"10000000. {text}"}] for text in self._texts]
        return max(len(language.chat_tokens(chat)) for chat in chats)


# --- parts -------------------------------------------------------------------------------------------------------


def measure_part(part: str, engines: Sequence[Engine], args: argparse.Namespace) -> dict[str, Any]:
    """Everything measured of a part, by engine."""
    if part == "start":
        return _starts(engines, args)
    texts: Texts = args.prompts
    context = _up(texts.longest() + args.new_tokens)
    if part in LOADS:
        at_once = LOADS[part]
        count = max(4, min(2 * at_once, 32))

        def load(url: str, number: int) -> Figures:
            return http_load.load(url, texts.some(count, part, number), at_once, args.new_tokens)

        return _by_turns(engines, Shape(slots=at_once, context=context), load, args)
    if part == "prefill":
        return _by_turns(engines, Shape(slots=1, context=_up(max(PREFILL_LENS) + 64)), _prefills, args)
    if part == "turn":

        def last_turn(url: str, number: int) -> Figures:
            return http_load.conversation(url, texts.some(TURNS, part, number), args.new_tokens)

        return _by_turns(engines, Shape(slots=1, context=TURNS * context), last_turn, args)
    length = _up(args.turns * (IN_TOKENS + OUT_TOKENS) + 128)
    flags = ("--context", str(length), "--pool-tokens", str(args.sessions * length))
    shape = Shape(slots=args.sessions, context=length, roost_flags=flags)
    found = {}
    for engine in engines:  # only Roost has sessions; each alone and once, since it takes minutes
        if engine.setting != RIVAL:
            with Process(engine.command(shape), environment=engine.environment) as process:
                run = partial(http_load.sessions, process.url, args.sessions, args.turns)
                figures = _watched(run, {engine.name: process}, engine.name)
                found[engine.name] = {"rounds": [figures], "memory_mb": _memory(process)}
    return found


def _up(tokens: int) -> int:
    return -(-tokens // 256) * 256


def _prefills(url: str, number: int) -> Figures:
    return {
        f"{length}_tokens_s": http_load.prefill(url, http_load.random_tokens(length, 10 * number + at))
        for at, length in enumerate(PREFILL_LENS)
    }


def _by_turns(
    engines: Sequence[Engine], shape: Shape, measure: Callable[[str, int], Figures], args: argparse.Namespace
) -> dict[str, Any]:
    """Rounds in which each engine is measured once, beside the others, which are idle."""
    with ExitStack() as started:
        processes = {
            engine.name: started.enter_context(Process(engine.command(shape), environment=engine.environment))
            for engine in engines
        }
        for process in processes.values():
            measure(process.url, 0)
        rounds: dict[str, list[Figures]] = {name: [] for name in processes}
        for number, name in itertools.product(range(1, args.rounds + 1), processes):
            tries: list[Figures] = []
            while not tries or (tries[-1]["other_cores"] > OTHER_CORES_MAX and len(tries) <= args.again):
                fresh = number + len(tries) * (args.rounds + 1)  # a prompt cache has what was asked before
                tries.append(_watched(partial(measure, processes[name].url, fresh), processes, name))
            rounds[name].append(min(tries, key=lambda figures: figures["other_cores"]))
        return {
            name: {"rounds": rounds[name], "ready_s": process.ready_s, "memory_mb": _memory(process)}
            for name, process in processes.items()
        }


def _watched(measure: Callable[[], Figures], processes: dict[str, Process], name: str) -> Figures:
    """What was measured of an engine, and how many cores the idle ones and other programs used meanwhile."""
    before_s = {each: process.cpu_s() for each, process in processes.items()}
    machine_s, client_s, began = cores_busy_s(), time.process_time(), time.perf_counter()
    figures = measure()
    wall_s = time.perf_counter() - began
    spent_s = {each: process.cpu_s() - before_s[each] for each, process in processes.items()}
    others_s = cores_busy_s() - machine_s - (time.process_time() - client_s) - sum(spent_s.values())
    idle_s = sum(spent_s.values()) - spent_s[name]
    return {**figures, "other_cores": others_s / wall_s, "idle_cores": idle_s / wall_s}


def _memory(process: Process) -> dict[str, float]:
    return {"resident": sum(process.resident_mb()), "proportional": process.proportional_mb()}


def _starts(engines: Sequence[Engine], args: argparse.Namespace) -> dict[str, Any]:
    """From the start of the process to the first token. Cold: nothing compiled, and the weights not in memory."""
    found: dict[str, Any] = {engine.name: {"rounds": []} for engine in engines}
    texts, model = args.prompts, default_model()
    shape = Shape(slots=1, context=_up(texts.longest() + 8))
    for number, engine in itertools.product(range(args.rounds), engines):
        figures = {}
        with tempfile.TemporaryDirectory() as empty:
            (Path(empty) / model.name).symlink_to(model)
            cold = {"ROOST_CACHE": empty, "NUMBA_CACHE_DIR": empty}
            with model.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for key, changed in (("cold_s", cold), ("warm_s", {})):
                with Process(engine.command(shape), environment=engine.environment | changed) as process:
                    times = http_load.chat(process.url, texts.some(1, "start", number)[0], 8)
                    figures[key] = times.stamps[0][0] - process.began
                    found[engine.name]["memory_mb"] = _memory(process)
        found[engine.name]["rounds"].append(figures)
    return found


# --- engines -----------------------------------------------------------------------------------------------------


def engines_of(args: argparse.Namespace, rival: Callable[[Shape], list[str]]) -> Iterator[Engine]:
    """llama.cpp, and Roost of each tree with each set of flags in each setting; a name says what differs."""
    if RIVAL in args.engines:
        yield Engine(name=RIVAL, setting=RIVAL, command=rival, environment={})
    trees: list[Path] = args.tree or [Path(__file__).parents[1]]
    all_flags: list[str] = args.roost_args or [""]
    if len({tree.resolve().name for tree in trees}) < len(trees) or len(set(all_flags)) < len(all_flags):
        raise SystemExit(
            "--tree and --roost-args: folders' names and flags must differ, since engines are named by them"
        )
    for tree, flags, setting in itertools.product(trees, all_flags, SETTINGS):
        if setting not in args.engines:
            continue
        name = f"Roost {setting}"
        name += f" {flags}".rstrip() if len(all_flags) > 1 else ""
        name += f" ({tree.resolve().name})" if len(trees) > 1 else ""
        yield Engine(
            name=name,
            setting=setting,
            command=partial(_roost_command, args.threads, [*SETTINGS[setting], *shlex.split(flags)]),
            environment={"PYTHONPATH": str(tree.resolve() / "src")},
        )


def _roost_command(threads: int, flags: list[str], shape: Shape) -> list[str]:
    fixed = ["--port", "0", "--device", "cpu", "--threads", str(threads)]
    return [sys.executable, "-m", "roost", "serve", *fixed, *shape.roost_flags, *flags]


# --- report ------------------------------------------------------------------------------------------------------


def ratio(figure: Figure, own: Sequence[Figures], other: Sequence[Figures]) -> float:
    """How many times as good as another engine: the median of the rounds' ratios."""
    pairs = [(mine[figure.key], theirs[figure.key]) for mine, theirs in zip(own, other, strict=True)]
    return statistics.median(theirs / mine if figure.is_time else mine / theirs for mine, theirs in pairs)


def rows_of(found: dict[str, Any], engines: Sequence[Engine]) -> Iterator[dict[str, Any]]:
    """The table: each figure of each engine."""
    firsts = {engine.setting: engine.name for engine in reversed(engines)}  # of the trees and flags, by setting
    for figure, engine in itertools.product(FIGURES, engines):
        part = found.get(figure.part, {})
        if engine.name not in part:
            continue
        own = part[engine.name]
        over = {
            key: ratio(figure, own["rounds"], part[other]["rounds"])
            for key, other in (("llama_cpp", RIVAL), ("first", firsts[engine.setting]))
            if other in part and other != engine.name
        }
        others = [each["other_cores"] for each in own["rounds"] if "other_cores" in each]
        median, aim = statistics.median(each[figure.key] for each in own["rounds"]), figure.aims.get(engine.setting)
        yield {
            "figure": figure.title,
            "engine": engine.name,
            "median": median,
            "least": min(each[figure.key] for each in own["rounds"]),
            "most": max(each[figure.key] for each in own["rounds"]),
            "over": over,
            "aim": aim,
            "reached": _reached(aim, median if figure.is_limit else over.get("llama_cpp"), is_limit=figure.is_limit),
            "is_limit": figure.is_limit,
            "other_cores": statistics.mean(others) if others else None,
            "memory_mb": own["memory_mb"],
        }


def _reached(aim: float | None, found: float | None, *, is_limit: bool) -> bool | None:
    """Whether an aim was reached; None where there is none, or nothing to hold against it."""
    if aim is None or found is None:
        return None
    return found <= aim if is_limit else found >= aim


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table()
    for heading in ("figure", "engine"):
        table.add_column(heading)
    for heading in ("median", "least–most", "× llama.cpp", "aim", "", "× first", "RSS MB", "PSS MB", "others' cores"):
        table.add_column(heading, justify="right")
    for row in rows:
        over, aim, memory = row["over"], row["aim"], row["memory_mb"]
        table.add_row(
            row["figure"],
            row["engine"],
            f"{row['median']:.4g}",
            f"{row['least']:.4g}–{row['most']:.4g}",
            f"{over['llama_cpp']:.2f}" if "llama_cpp" in over else "",
            "" if aim is None else f"{'≤' if row['is_limit'] else '≥'} {aim}",
            {True: "reached", False: "missed", None: ""}[row["reached"]],
            f"{over['first']:.2f}" if "first" in over else "",
            f"{memory['resident']:.0f}",
            f"{memory['proportional']:.0f}",
            "" if row["other_cores"] is None else f"{row['other_cores']:.2f}",
        )
    Console(file=sys.stdout, width=160).print(table)


def warn_of_others(part: str, found: dict[str, Any]) -> None:
    """Say where a part was not measured on a quiet machine, or beside engines that were not idle."""
    for key, most, who in (
        ("idle_cores", IDLE_CORES_MAX, "the engines that were not asked"),
        ("other_cores", OTHER_CORES_MAX, "other programs"),
    ):
        used = [figures[key] for each in found.values() for figures in each["rounds"] if key in figures]
        if used and max(used) > most:
            shares = f"{statistics.mean(used):.2f} cores, in the worst round {max(used):.2f}"
            print(f"{part}: {who} used {shares}", file=sys.stderr, flush=True)


# --- command -----------------------------------------------------------------------------------------------------


def _names(allowed: Sequence[str], text: str) -> list[str]:
    names = [each for each in text.split(",") if each]
    if not names or set(names) - set(allowed):
        raise argparse.ArgumentTypeError(f"must be some of {','.join(allowed)}, got {text!r}")
    return [each for each in allowed if each in names]


def _count(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a number from {least}, got {text!r}")
    return int(text)


def _tree(text: str) -> Path:
    if not (Path(text) / "src" / "roost").is_dir():
        raise argparse.ArgumentTypeError(f"must be a checkout of Roost, with src/roost in it, got {text!r}")
    return Path(text)


def _texts(text: str) -> Texts:
    try:
        return Texts([turns[0] for turns in read_turns(Path(text))])
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--prompts: ")) from error


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command's flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = (RIVAL, *SETTINGS)
    parser.add_argument("--parts", type=partial(_names, PARTS), default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--engines", type=partial(_names, known), default=list(known), help=f"of {','.join(known)}")
    parser.add_argument("--rounds", type=_count, default=5, help="that count; one more warms up")
    parser.add_argument(
        "--again", type=partial(_count, least=0), default=0, help="times that what others disturbed is repeated"
    )
    parser.add_argument("--threads", type=_count, default=os.cpu_count(), help="of each engine; all cores if absent")
    parser.add_argument(
        "--prompts", type=_texts, default=Texts(PROMPTS), help="a JSON object with `turns` or `prompt` a line"
    )
    parser.add_argument("--new-tokens", type=_count, default=128, help="of each answer, whatever it says")
    parser.add_argument("--sessions", type=_count, default=8)
    parser.add_argument("--turns", type=partial(_count, least=21), default=150, help="of each session")
    parser.add_argument("--roost-args", action="append", default=[], help='flags of roost serve, as "--backend torch"')
    parser.add_argument("--tree", type=_tree, action="append", default=[], help="a checkout of Roost; this if absent")
    parser.add_argument("--scratch", type=Path, default=None, help="for llama.cpp; in Roost's cache folder if absent")
    parser.add_argument("--out", type=Path, default=None, help="a folder for versus_llama_cpp.json")
    return parser.parse_args(argv)


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main(argv: Sequence[str]) -> None:
    """Measure, print a table, write JSON."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the servers are, too
    scratch, about = args.scratch or cache_folder() / "llama_cpp", dict[str, Any]()
    if RIVAL in args.engines:
        about = llama_cpp.environment(scratch)

    def rival(shape: Shape) -> list[str]:
        model = default_model()
        return llama_cpp.command(scratch, model, threads=args.threads, slots=shape.slots, context=shape.context)

    engines = list(engines_of(args, rival))
    told = {
        "command": shlex.join(["python", "-m", "bench.versus_llama_cpp", *argv]),
        "began": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cpu": _cpu(),
        "threads": args.threads,
        "load_average": os.getloadavg(),
        RIVAL: about,
    }
    print(json.dumps(told), flush=True)
    found: dict[str, Any] = {}
    try:
        for part in args.parts:
            print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)
            found[part] = measure_part(part, engines, args)
            warn_of_others(part, found[part])
            if args.out is not None:
                args.out.mkdir(parents=True, exist_ok=True)
                report = {**told, "rows": list(rows_of(found, engines)), "parts": found}
                (args.out / "versus_llama_cpp.json").write_text(json.dumps(report, indent=1) + "\n")
    finally:  # also if it is ended: a part takes minutes
        show(list(rows_of(found, engines)))


if __name__ == "__main__":
    main(sys.argv[1:])
