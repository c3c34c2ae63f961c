"""Watcher: somebody who watches the engine, and has nothing but frames; what they make of it must be what there is."""

from typing import Any

from roost.kv.ledger import FREE, NULL_ACCOUNT, owner_of
from roost.messages import Event, Frame
from roost.sched.engine import Engine
from roost.sched.live import KINDS, TURNS_SHOWN


class Watcher:
    """Frames, merged."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cells: dict[str, dict[int, tuple[str, str]]] = {}  # by book and page: kind and key of the owner
        self.owners: dict[str, str] = {}
        self.sessions: dict[str, dict[str, Any]] = {}
        self.steps: list[Any] = []
        self.told: dict[str, Any] = {}  # the last frame

    def hear(self, event: Event) -> None:
        """Merge a frame, and compare."""
        assert isinstance(event, Frame), event
        self.told = told = event.told
        if told["whole"]:
            self.cells, self.owners, self.sessions, self.steps = {}, {}, {}, []
        for pool in told["pools"]:
            cells = self.cells.setdefault(pool["book"], {})
            for first, count, kind, key in pool["runs"]:
                cells |= {page: (KINDS[kind], key) for page in range(first, first + count)}
            kinds = [kind for kind, _ in cells.values()]
            counts = {kind: kinds.count(kind) for kind in KINDS}
            leased = counts["leased"] + counts["window"]
            assert (counts["free"], leased, counts["cached"], counts["retiring"], counts["padding"]) == (
                *(pool["free"], pool["leased"], pool["cached"], pool["retiring"], 1),
            ), (pool, counts)
        self.owners |= told["owners"]
        for name in told["sessions_gone"]:
            del self.sessions[name]
        self.sessions |= {each["id"]: each for each in told["sessions"]}
        self.steps += told["steps"]
        self._check()

    def _check(self) -> None:
        state = self._engine.state
        for book, pool in enumerate(state.resolved.pools):
            cells = self.cells[pool.name]
            for page, account in state.store.ledger.accounts(book):
                if account in (FREE, NULL_ACCOUNT):
                    assert cells[page] == ("free" if account == FREE else "padding", ""), (pool.name, page)
                    continue
                owner, number = owner_of(account)
                assert cells[page][1] == f"{'?LNS'[owner]}{number}", (pool.name, page, cells[page])
                assert self.owners[cells[page][1]], cells[page]
        told = [
            (each["id"].partition(" #")[0], each["length"], each["num_turns"], each["turns"])
            for each in self.sessions.values()
        ]
        assert sorted(told) == sorted(
            (each.name, len(each.record), len(each.turns), [turn.end_len for turn in each.turns][-TURNS_SHOWN:])
            for each in state.sessions.table.values()
        )
        assert [row["id"] for row in self.told["rows"]] == [request.id for request in state.running]
        assert [each["id"] for each in self.told["queue"]] == [request.id for request in state.queued]
        assert [each[0] for each in self.steps] == sorted({each[0] for each in self.steps})
