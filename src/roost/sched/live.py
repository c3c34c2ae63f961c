"""Live view: what the engine is doing, as changes since the last frame, for people who watch.

Nothing is kept while nobody watches, but for the step log; then the ledger notes the pages that move, and one step a
frame brings back a drafted tree. No texts and no tokens, but for the tree's where the server is told to show them.
Called by intake and settle.
"""

from collections import Counter
from collections.abc import Iterable
from heapq import nlargest
from typing import Any

from roost.kv.ledger import FREE, NULL_ACCOUNT, Account, Owner, owner_of
from roost.kv.node import NodeId
from roost.kv.pages import BookId, PageId
from roost.messages import Frame, Stats
from roost.sched.report import stats
from roost.sched.request import LaunchedStep, Request
from roost.sched.state import State
from roost.sched.watched import Watched
from roost.session.table import Session
from roost.step import DraftTree, StepResult

KINDS = ("free", "leased", "cached", "retiring", "window", "padding")
_FREE, _LEASED, _CACHED, _RETIRING, _WINDOW, _PADDING = range(len(KINDS))
_OF_OWNER = {Owner.LEASE: (_LEASED, "L"), Owner.NODE: (_CACHED, "N"), Owner.STEP: (_RETIRING, "S")}
ROWS_SHOWN, QUEUE_SHOWN, SESSIONS_SHOWN, TURNS_SHOWN = 128, 100, 256, 200  # turns of each session, the last ones
_ID_CHARS, _HEAD, _TAIL = 20, 8, 6
_MS = 1e6  # nanoseconds
_TOTALS = (
    *("queued", "running", "sessions", "waiting_for", "steps", "step_age_ms", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "retractions", "failed_steps", "sessions_reclaimed"),
)

Json = dict[str, Any]
Run = tuple[int, int, int, str]  # first page, how many, index of the kind, key of the owner


def short(name: str) -> str:
    """An id that is short enough to show."""
    return name if len(name) <= _ID_CHARS else f"{name[:_HEAD]}…{name[-_TAIL:]}"


def frame(state: State, *, is_whole: bool) -> Frame:
    """What has changed since the last frame, or everything; from now on changes are noted."""
    if state.watched is None or is_whole:
        touched = [{page for page, _ in state.store.ledger.accounts(book)} for book in _books(state)]
        state.watched = Watched(touched=touched)
        is_whole = True
    watched, now = state.watched, stats(state)
    runs = [page_runs(state, book, sorted(watched.touched[book])) for book in _books(state)]
    watched.touched = state.store.ledger.watch()
    told: Json = {"whole": is_whole, "now_ms": state.now / _MS, "totals": totals(now), "pools": pools(now, runs)}
    if is_whole:
        told |= {"kinds": KINDS, "page_size": state.resolved.page_size}
    told["owners"] = _changed(watched.owners, _owners(state, runs))
    told |= _session_changes(state, watched)
    told["rows"] = [_row(request) for request in state.running[:ROWS_SHOWN]]
    told["queue"] = [_waiting(state, number, request) for number, request in enumerate(state.queued[:QUEUE_SHOWN])]
    steps = state.step_log.since(watched.step)
    watched.step = steps[-1].number if steps else watched.step
    told["steps"] = [
        (
            *(step.number, step.planned_at / _MS, step.host / _MS, step.device / _MS, step.collect / _MS),
            *(step.num_rows, step.chunk_tokens, step.width, step.num_tokens, int(step.has_failed)),
        )
        for step in steps
    ]
    told |= {"tree": watched.tree, "spec": _speculation(state, now)}
    watched.wants_tree = True
    return Frame(told=told)


def stop(state: State) -> Frame:
    """Nobody watches any more."""
    state.watched = None
    state.store.ledger.watch(is_on=False)
    return Frame(told={})


def page_map(state: State) -> Frame:
    """Who owns each page, and the sums of the same moment."""
    now = stats(state)
    runs = [page_runs(state, book, range(state.resolved.pools[book].num_pages)) for book in _books(state)]
    told = {"kinds": KINDS, "page_size": state.resolved.page_size, "pools": pools(now, runs)}
    return Frame(told={**told, "owners": _owners(state, runs)})


# --- drafted trees -------------------------------------------------------------------------------------------------


def row_to_show(state: State, requests: Iterable[Request], chunks: Iterable[int], widths: Iterable[int]) -> int:
    """The row whose drafted tree a step brings back, of rounds that carry drafts; -1: none."""
    if state.watched is None or not state.watched.wants_tree:
        return -1
    rows = zip(requests, chunks, widths, strict=True)
    shown = (request.row for request, chunk, width in rows if not chunk and width > 1)
    return next((row for row in shown if row is not None), -1)


def show_tree(state: State, launched: LaunchedStep, result: StepResult) -> None:
    """A step has brought back a tree."""
    tree: DraftTree | None = result.tree
    if tree is None or state.watched is None:
        return
    request = launched.requests[tree.place]
    state.watched.wants_tree = False
    state.watched.tree = {
        "id": short(request.id),
        "parents": tree.parents.tolist(),
        "accepted": tree.accepted.tolist(),
        "tokens": tree.tokens.tolist(),
    }


# --- pages ---------------------------------------------------------------------------------------------------------


def _books(state: State) -> range:
    return range(len(state.resolved.pools))


def page_runs(state: State, book: BookId, pages: Iterable[int]) -> list[Run]:
    """Pages in order, those that follow each other and have one owner as one run."""
    ledger, is_window = state.store.ledger, state.resolved.pools[book].name == "window"
    listed = [PageId(page) for page in pages]
    runs: list[Run] = []
    last, began, before = Account(-1), 0, -2
    for page, account in zip(listed, ledger.accounts_of(book, listed), strict=True):
        if account != last or page != before + 1:
            if before >= 0:
                runs.append((began, before + 1 - began, *_owner(last, is_window=is_window)))
            last, began = account, page
        before = page
    if before >= 0:
        runs.append((began, before + 1 - began, *_owner(last, is_window=is_window)))
    return runs


def _owner(account: Account, *, is_window: bool) -> tuple[int, str]:
    """The kind of an account, and the key of its owner."""
    if account in (FREE, NULL_ACCOUNT):
        return (_FREE if account == FREE else _PADDING), ""
    kind, number = owner_of(account)
    index, letter = _OF_OWNER[kind]
    return (_WINDOW if is_window and index == _LEASED else index), f"{letter}{number}"


def _owners(state: State, runs: list[list[Run]]) -> dict[str, str]:
    """The owners of some pages in words, and those of all leases, whose holders change."""
    keys = {key for of_book in runs for *_, key in of_book if key and key[0] != "L"}
    nodes = [state.store.tree.nodes.get(NodeId(int(key[1:]))) for key in keys if key[0] == "N"]
    # one that was split begins later, although none of its pages has moved: those of the new node above it have
    keys |= {f"N{below.id}" for node in nodes if node is not None for below in node.children.values()}
    found = {key: _in_words(state, key) for key in keys}
    for number, lease in state.store.leases.items():
        if isinstance(lease.holder, str):
            session = state.sessions.table.get(lease.holder)
            found[f"L{number}"] = f"session {short(lease.holder if session is None else session.name)}, idle"
        else:
            request = state.turns.get(lease.holder)
            found[f"L{number}"] = "a request that has ended" if request is None else _holder(request)
    return found


def _holder(request: Request) -> str:
    session = request.turn.session
    return f"request {short(request.id)}" if session is None else f"session {short(session.name)}, running"


def _in_words(state: State, key: str) -> str:
    number = int(key[1:])
    if key[0] == "S":
        return f"until step {number} is collected"
    node = state.store.tree.nodes.get(NodeId(number))
    return "prefix cache" if node is None else f"prefix cache, tokens {node.start} to {node.end}"


def pools(now: Stats, runs: list[list[Run]]) -> list[Json]:
    """The sums of each pool, and its pages."""
    return [
        {
            "book": pool.book,
            "total": pool.total,
            "free": pool.free,
            "leased": pool.leased,
            "cached": pool.cached,
            "retiring": pool.retiring,
            "runs": of_book,
        }
        for pool, of_book in zip(now.pools, runs, strict=True)
    ]


# --- the rest ------------------------------------------------------------------------------------------------------


def totals(now: Stats) -> Json:
    """Sums since the start, and what waits and runs now."""
    found = {name: getattr(now, name) for name in _TOTALS}
    return {**found, "endings": dict(now.endings)}


def _session_changes(state: State, watched: Watched) -> Json:
    """The sessions used last, as far as they have changed, and those that are not among them any more."""
    table = state.sessions.table.values()
    shown: Iterable[Session] = table
    if len(table) > SESSIONS_SHOWN:
        shown = nlargest(SESSIONS_SHOWN, table, key=lambda each: (each.turn is not None, each.last_used))
    found, times = {each.id: _session(state, each) for each in shown}, Counter[str]()
    for told in found.values():  # another client's may have the same name, and long ones look alike
        times[told["id"]] += 1
        told["id"] += f" #{number}" if (number := times[told["id"]]) > 1 else ""
    before, now = ({told["id"] for told in each.values()} for each in (watched.sessions, found))
    changed = [told for name, told in found.items() if watched.sessions.get(name) != told]
    watched.sessions = found
    return {"sessions": changed, "sessions_gone": sorted(before - now)}


def _session(state: State, session: Session) -> Json:
    request = state.turns.get(session.turn) if session.turn is not None else None
    phase = "idle" if request is None else "waiting" if request.row is None else "running"
    lease = session.lease if request is None or request.turn.lease is None else request.turn.lease
    return {
        "id": short(session.name),
        "parent": short(session.forked_from) if session.forked_from else None,
        "length": len(session.record),
        "resident": 0 if lease is None else lease.settled_len,
        "num_turns": len(session.turns),
        "turns": [turn.end_len for turn in session.turns[-TURNS_SHOWN:]],
        "state": "closing" if session.closing else phase,
        "used_ms": session.last_used / _MS,  # what it is idle changes all the time
    }


def _row(request: Request) -> Json:
    turn, counters, session = request.turn, request.spec_counters, request.turn.session
    rounds = counters.rounds
    accepted = sum(number * count for number, count in enumerate(counters.histogram)) if rounds else 0
    return {
        "id": short(request.id),
        "session": None if session is None else short(session.name),
        "phase": "prefill" if request.in_prefill else "decode",
        "prompt": turn.prompt_len,
        "done": min(request.lease.settled_len, turn.prompt_len),
        "output": request.output_len,
        "max": request.max_new_tokens,
        "cached": max(0, request.cached_len),
        "accept": round((rounds + accepted) / rounds, 2) if rounds else 0.0,
    }


def _waiting(state: State, number: int, request: Request) -> Json:
    session = request.turn.session
    return {
        "id": short(request.id),
        "session": None if session is None else short(session.name),
        "waits": state.waiting_for if number == 0 else f"{number} before it",
    }


def _speculation(state: State, now: Stats) -> Json:
    """How drafts do, and what steps of each width are expected to take beside as many rows as run now."""
    spec, number = now.spec, max(1, len(state.running))
    costs = [(width, state.step_times.of_rounds(number, width)) for width in state.resolved.widths.of(number)]
    last = state.step_log.last
    return {
        "rounds": spec.rounds,
        "offered": spec.drafts_offered,
        "accepted": spec.drafts_accepted,
        "histogram": spec.histogram,
        "lengths": now.draft_lengths,
        "chosen": max(0, last.width - 1) if last is not None else 0,
        "costs": [(width, time / _MS) for width, time in costs if time is not None],
    }


def _changed(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """What is new or different; the rest was told before, and is kept while it may still be named."""
    changed = {key: text for key, text in now.items() if before.get(key) != text}
    before.clear()
    before.update(now)
    return changed
