"""Wanted states: at which positions the next step of a sequence keeps the state of its recurrent layers.

At every interval, so that little has to be run again; at pages' ends, since the prefix cache has whole pages; where a
turn of a session ended, to be rewound to. Never at a position that rejected drafts could have had a say in. Called by
the planner's columns.
"""

from roost.kv.lease import PLANNED, Lease, StateKind
from roost.kv.pages import floor_to
from roost.kv.states import States


def wanted_of_chunk(states: States, lease: Lease, end: int, *, is_final: bool) -> dict[int, StateKind]:
    """What the next step shall keep that runs a chunk of a prompt up to `end`.

    A turn may begin by running its last token again, so nothing is kept at the very end; but where the session's turn
    before ended, it is kept exactly.
    """
    pool, size, last = states.pool, states.page_size, states.last_at(lease, PLANNED)
    wanted: dict[int, StateKind] = {}
    at_page = floor_to(end - 1, size)
    if at_page > last and (is_final or end - last > pool.interval):
        is_apart = at_page - _last_prompt_state(lease) >= pool.spacing
        wanted[at_page] = StateKind.PROMPT if is_final or is_apart else StateKind.RUNNING
    if pool.interval < size and floor_to(end - 1, pool.interval) > max(last, at_page):
        wanted[floor_to(end - 1, pool.interval)] = StateKind.RUNNING
    if last < lease.turn_end <= end:
        wanted[lease.turn_end] = StateKind.TURN_END
    return wanted


def wanted_of_round(states: States, lease: Lease, length: int) -> dict[int, StateKind]:
    """The same of a round, while so much is certain to stay."""
    size, interval, last = states.page_size, states.pool.interval, states.last_at(lease, PLANNED)
    steps = {size, interval} if interval < size else {interval}
    return {floor_to(length, step): StateKind.RUNNING for step in steps if floor_to(length, step) > last}


def _last_prompt_state(lease: Lease) -> int:
    """Where a prompt has left its last state for the prefix cache."""
    own = (position for position, state in lease.states.items() if state.kind is StateKind.PROMPT)
    return max((*own, *lease.tree_states, lease.shared_len), default=0)
