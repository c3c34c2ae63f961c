"""Watch screen: one picture of a watched server as lines of text, for any width and height.

Kinds differ by their characters too, not by colour alone, so the same picture is plain text. Lists share the
height that is left and say how much of them is not shown. `top` prints the lines, and calls this.
"""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from roost.cli.watched_server import UNKNOWN_KIND, LiveState, WatchedPool, WatchedSession

_KINDS = {  # character and colour of a page
    "free": ("·", "bright_black"),
    "leased": ("█", "green"),
    "cached": ("▓", "blue"),
    "retiring": ("▒", "yellow"),
    "window": ("░", "magenta"),
    "padding": ("×", "bright_black"),
}
_OTHER_KIND = ("▚", "cyan")  # of a server that knows more of them
_LEVELS = "▁▂▃▄▅▆▇█"
_HEALTH = {"ok": "green", "loading": "yellow", "stalled": "bold red", "gone": "bold red"}
_DIM = "bright_black"
_BAR_LEAST, _BAR_MOST = 8, 40
_ID_WIDTH = 18
_STATE_WIDTH = 12
_INDENT_MAX = 6  # levels of forks; deeper ones are not indented further
_PLACES_MAX = 8  # of acceptance, and of costs
_HOLDERS = 3
_LEAST = 3  # lines of each list, where the height is short


@dataclass(slots=True, kw_only=True)
class _Panel:
    """A heading and its lines; where the height is short a list is cut, and the last lines of others are left out."""

    lines: list[Text]
    spare: int = 0  # of these, lines at the end that may be left out
    is_list: bool = False
    heading: Text = field(default_factory=Text)

    def cut(self, most: int) -> list[Text]:
        """The heading and at most so many lines."""
        if len(self.lines) <= most:
            return [self.heading, *self.lines]
        shown = self.lines[: most - 1]
        return [self.heading, *shown, Text(f"  … {len(self.lines) - len(shown)} more", _DIM)]


def picture(
    server: LiveState, now_ms: float, *, url: str, note: str = "", width: int, height: int | None = None
) -> list[Text]:
    """The lines of the picture; `note` says what is wrong with the connection; without a height nothing is cut."""
    sections = [_Panel(lines=_head(server, now_ms, url, note))]
    if server.is_known:
        map_lines = 4 if height is None else max(1, height // 10)
        sections += [_pool(server, each, width, map_lines) for each in server.pools.values()]
        sections += [_Panel(lines=_steps(server, width), spare=5), _Panel(lines=_drafts(server), spare=3)]
        bar_width = max(_BAR_LEAST, min(width // 4, _BAR_MOST))
        sections += [_Panel(lines=[Text()]), _sessions(server, now_ms, bar_width), _rows(server, bar_width)]
        sections.append(_queue(server))
    lines = _fitted([each for each in sections if each.lines or each.is_list], height)
    for line in lines if height is not None else ():
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def _fitted(sections: list[_Panel], height: int | None) -> list[Text]:
    """The lines of all sections; lists get what height is left, one line in turn."""
    lists = [each for each in sections if each.is_list]
    shares = [len(each.lines) if height is None else min(len(each.lines), _LEAST) for each in lists]
    if height is not None:
        left = height - sum(len(each.lines) for each in sections if not each.is_list) - sum(shares) - len(lists)
        for each in reversed(sections):
            num_dropped = max(0, min(each.spare, len(each.lines) - 1, -left))
            del each.lines[len(each.lines) - num_dropped :]
            left += num_dropped
        while left > 0 and any(len(each.lines) > share for each, share in zip(lists, shares, strict=True)):
            for number, each in enumerate(lists):
                if left > 0 and shares[number] < len(each.lines):
                    shares[number] += 1
                    left -= 1
    lines = [line for each in sections if not each.is_list for line in each.lines]
    for each, share in zip(lists, shares, strict=True):
        lines += each.cut(share)
    return lines


# --- what all of it does ---------------------------------------------------------------------------------------


def _head(server: LiveState, now_ms: float, url: str, note: str) -> list[Text]:
    title = Text("roost")
    title.stylize("bold")
    title.append(f" {server.version}  {server.model}  " if server.is_known else "  ")
    if note:
        title.append(note, "bold red")
    else:
        title.append(server.health or "waiting for the first frame", _HEALTH.get(server.health, "yellow"))
    title.append(f"  {url}", _DIM)
    if not server.is_known:
        return [title]
    totals = server.totals
    steps_s, output_s, prompt_s = server.rates(now_ms)
    rates = Text(f"{output_s:.1f} tok/s out  {prompt_s:.1f} tok/s in  {steps_s:.1f} steps/s  ", "bold")
    rates.append(
        f"{_count(totals, 'running')} running  {_count(totals, 'queued')} queued  {_count(totals, 'sessions')} sessions"
    )
    sums = Text("", _DIM)
    sums.append(f"{_count(totals, 'prompt_tokens')} prompt tokens ({_count(totals, 'cached_tokens')} cached), ")
    sums.append(f"{_count(totals, 'completion_tokens')} output; {_count(totals, 'steps')} steps")
    for name, text in (
        ("failed_steps", "failed"),
        ("retractions", "retractions"),
        ("sessions_reclaimed", "sessions reclaimed"),
    ):
        if totals.get(name):
            sums.append(f"  {totals[name]:,} {text}", "red" if name == "failed_steps" else "yellow")
    return [title, rates, sums, *_ends(totals)]


def _ends(totals: dict[str, Any]) -> list[Text]:
    """How requests ended and why others were refused, if any."""
    line = Text("", _DIM)
    for name, text, style in (("endings", "ended", _DIM), ("refusals", "refused", "yellow")):
        counts = {key: count for key, count in totals.get(name, {}).items() if count}
        if counts:
            line.append(f"{text}: {', '.join(f'{key} {count:,}' for key, count in counts.items())}  ", style)
    return [line] if line.plain else []


def _count(totals: dict[str, Any], name: str) -> str:
    return f"{totals.get(name, 0):,}"


# --- pages -----------------------------------------------------------------------------------------------------


def _pool(server: LiveState, pool: WatchedPool, width: int, lines_max: int) -> _Panel:
    """The sums of a pool, its map, and who holds most of it."""
    unit = pool.book if pool.book == "states" else f"{pool.book} pages of {server.page_size}"
    lines = [Text(), Text(f"{pool.total:,} {unit}", "bold")]
    counts = Counter(pool.kinds[1:])
    for number, name in enumerate(server.kinds):
        if counts[number] or name in pool.sums:
            mark, style = _KINDS.get(name, _OTHER_KIND)
            lines[1].append(f"  {mark} {name} {pool.sums.get(name, counts[number]):,}", style)
    pages_per_cell = max(1, -(-pool.total // max(1, width * lines_max)))
    cells = Text()
    for first in range(1, pool.total + 1, pages_per_cell):
        cells.append(*_cell(server, pool.kinds[first : first + pages_per_cell]))
    if pages_per_cell > 1:
        lines[1].append(f"  (a character: {pages_per_cell} pages)", _DIM)
    lines += [cells[start : start + width] for start in range(0, len(cells), width)]
    if holders := server.holders(pool, _HOLDERS):
        said = "; ".join(f"{label} {count:,}" for label, count in holders)
        lines.append(Text(f"held most: {said}", _DIM))
    return _Panel(lines=lines, spare=1 if holders else 0)


def _cell(server: LiveState, kinds: bytearray) -> tuple[str, str]:
    """The character and the colour of the commonest kind of some pages."""
    kind = max(set(kinds), key=kinds.count)
    if kind == UNKNOWN_KIND:
        return " ", ""
    return _KINDS.get(server.kinds[kind], _OTHER_KIND) if kind < len(server.kinds) else _OTHER_KIND


# --- steps and drafts ------------------------------------------------------------------------------------------


def _steps(server: LiveState, width: int) -> list[Text]:
    """Times and sizes of the last steps, the newest at the right."""
    steps = list(server.steps)
    if not steps:
        return []
    heading = Text(f"last {len(steps)} steps", "bold")
    heading.append("  (the newest at the right; median, highest)", _DIM)
    lines = [Text(), heading]
    failed = [step.failed for step in steps]
    for name, style, values in (
        ("device", "green", [step.device_ms for step in steps]),
        ("host", "cyan", [step.host_ms for step in steps]),
        ("collect", "magenta", [step.collect_ms for step in steps]),
        ("rows", "white", [step.rows for step in steps]),
        ("chunk", "yellow", [step.chunk_tokens for step in steps]),
        ("width", "blue", [step.width for step in steps]),
    ):
        known: list[float] = [value or 0 for value in values]
        unit, form = (" ms", ".2f") if name in ("host", "device", "collect") else ("", ".0f")
        line = Text(f"  {name:<8}")
        line.append(f"{statistics.median(known):>8{form}} {max(known):>8{form}}{unit:<3} ")
        line.append_text(_sparkline(known, failed, max(1, width - len(line)), style))
        lines.append(line)
    return lines


def _sparkline(values: Sequence[float], failed: Sequence[bool], width: int, style: str) -> Text:
    """Values as small bars; where there are more than fit, the highest of each group. A failed step is a cross.

    A full bar stands for all values from the 95th percentile on, so that one slow step does not flatten the others.
    """
    per_bar = -(-len(values) // width)
    highest = sorted(values)[(len(values) - 1) * 95 // 100] or max(values)
    line = Text()
    first = len(values) % per_bar - per_bar if len(values) % per_bar else 0
    for start in range(first, len(values), per_bar):
        group = slice(max(start, 0), start + per_bar)
        if any(failed[group]):
            line.append("✗", "bold red")
        else:
            line.append(_level(max(values[group]) / highest if highest > 0 else 0), style)
    return line


def _level(share: float) -> str:
    """The bar of a share of the highest."""
    return _LEVELS[max(0, min(int(share * len(_LEVELS)), len(_LEVELS) - 1))]


def _drafts(server: LiveState) -> list[Text]:
    """Accept length, acceptance by place, learned costs, and the last draft tree that is told of."""
    spec, tree = server.spec or {}, server.tree
    if not spec.get("rounds"):
        return []
    rounds, histogram = spec["rounds"], spec.get("histogram") or []
    heading = Text("drafts", "bold")
    heading.append(f"  accept length {(rounds + spec['accepted']) / rounds:.2f} in {rounds:,} rounds", "")
    heading.append(f"  {spec['accepted']:,} of {spec['offered']:,} accepted", _DIM)
    if spec.get("chosen") is not None:
        heading.append(f"  length chosen now: {spec['chosen']}")
    lines = [Text(), heading]
    if shares := _accepted(histogram, spec.get("lengths") or []):
        line = Text("  accepted by place ")
        for place, share in enumerate(shares[:_PLACES_MAX], 1):
            line.append(f" {place}:").append(_level(share), "green").append(f"{share:.0%}")
        lines.append(line)
    if costs := spec.get("costs"):
        said = "  ".join(f"{nodes}: {ms:.2f} ms" for nodes, ms in costs[:_PLACES_MAX] if ms is not None)
        lines.append(Text(f"  learned costs by tokens  {said}", _DIM))
    if tree:
        lines.append(_tree(tree))
    return lines


def _accepted(histogram: list[int], lengths: list[int]) -> list[float]:
    """Of the rounds with a draft at each place, in how many it was accepted; places without drafts are left out."""
    drafted = [sum(lengths[place:]) or sum(histogram) for place in range(len(histogram))]
    shares = [min(1.0, sum(histogram[place:]) / max(drafted[place], 1)) for place in range(1, len(histogram))]
    while shares and not shares[-1]:
        shares.pop()
    return shares


def _tree(tree: dict[str, Any]) -> Text:
    """A draft tree by depth, its accepted path filled."""
    parents, accepted = tree["parents"], set(tree["accepted"])
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if 0 <= parent < len(depths) else 0)
    line = Text(f"  tree of {tree['id']}  ")
    for depth in range(max(depths, default=-1) + 1):
        line.append(" ─ " if depth else "", _DIM)
        for node in (node for node, each in enumerate(depths) if each == depth):
            line.append(*(("●", "green") if node in accepted else ("○", _DIM)))
    return line


# --- sessions, rows, queue -------------------------------------------------------------------------------------


def _sessions(server: LiveState, now_ms: float, bar_width: int) -> _Panel:
    num_sessions = max(server.totals.get("sessions", 0), len(server.sessions))
    heading = Text(f"sessions {num_sessions:,}", "bold")
    if num_sessions > len(server.sessions):
        heading.append(f"  (the {len(server.sessions):,} used last)", _DIM)
    heading.append("  (━ resident, ╌ not, ┿ ┼ a turn's end)" if server.sessions else "", _DIM)
    longest = max((each.length for each in server.sessions.values()), default=0)
    lines = [_session(each, depth, now_ms, bar_width, longest) for depth, each in server.family()]
    return _Panel(heading=heading, lines=lines, is_list=True)


def _session(session: WatchedSession, depth: int, now_ms: float, bar_width: int, longest: int) -> Text:
    """A session's state, its length as a part of the longest one's, and its turns."""
    line = Text("  " + "  " * max(0, min(depth, _INDENT_MAX) - 1) + ("└ " if depth else "") + session.id)
    _pad(line, _ID_WIDTH)
    is_idle = session.state == "idle"
    line.append(f" {session.state}" + (f" {_seconds(now_ms - session.since_ms)}" if is_idle else ""))
    line.stylize(_DIM if is_idle else "green", _ID_WIDTH)
    _pad(line, _ID_WIDTH + _STATE_WIDTH)
    width = -(-session.length * bar_width // longest) if longest else 0
    resident = -(-session.resident * width // session.length) if session.length else 0
    ends = {min(end * width // session.length, width - 1) for end in session.turns[:-1]} if session.length else set()
    for cell in range(width):
        is_resident = cell < resident
        mark = ("┿" if cell in ends else "━") if is_resident else ("┼" if cell in ends else "╌")
        line.append(mark, "green" if is_resident else _DIM)
    line.append(" " * (bar_width - width))
    line.append(f" {session.resident:,}/{session.length:,} tokens, {len(session.turns)} turns")
    if depth == 0 and session.parent:
        line.append(f", forked from {session.parent}", _DIM)
    return line


def _rows(server: LiveState, bar_width: int) -> _Panel:
    lines = [_row(each, bar_width) for each in server.rows]
    num_running = max(server.totals.get("running", 0), len(lines))
    heading = Text(f"running {num_running:,}", "bold")
    heading.append(f"  (the first {len(lines):,} of them)" if num_running > len(lines) else "", _DIM)
    return _Panel(heading=heading, lines=lines, is_list=True)


def _row(row: dict[str, Any], bar_width: int) -> Text:
    """How far a row's prompt is, and after that its output."""
    line = Text(f"  {row['id']}")
    _pad(line, _ID_WIDTH)
    is_prefill = row["phase"] == "prefill"
    style = "yellow" if is_prefill else "green"
    line.append(f" {row['phase']}", style)
    _pad(line, _ID_WIDTH + _STATE_WIDTH)
    done, most = (row["done"], row["prompt"]) if is_prefill else (row["output"], row["max"])
    filled = min(bar_width, done * bar_width // most) if most else 0
    line.append("█" * filled, style).append("░" * (bar_width - filled), _DIM)
    line.append(f" {done:,}/{most:,}" if most else f" {done:,}")
    line.append(" of the prompt" if is_prefill else f" after {row['prompt']:,}")
    line.append(f", {row['cached']:,} cached" if row["cached"] else "", _DIM)
    line.append(f", accept length {row['accept']:.2f}" if row.get("accept") else "")
    line.append(f", session {row['session']}" if row.get("session") else "", _DIM)
    return line


def _queue(server: LiveState) -> _Panel:
    lines = []
    for each in server.queue:
        line = Text(f"  {each['id']}")
        _pad(line, _ID_WIDTH)
        line.append(f" {each['waits'] or 'waits its turn'}", "yellow")
        line.append(f"  session {each['session']}" if each.get("session") else "", _DIM)
        lines.append(line)
    num_queued = max(server.totals.get("queued", 0), len(lines))
    heading = Text(f"queued {num_queued:,}", "bold")
    heading.append(f"  (the first {len(lines):,} of them)" if num_queued > len(lines) else "", _DIM)
    return _Panel(heading=heading, lines=lines, is_list=True)


def _pad(line: Text, width: int) -> None:
    """Make a line exactly so wide."""
    line.truncate(width, overflow="ellipsis", pad=True)


def _seconds(ms: float) -> str:
    seconds = max(ms, 0) / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
