"""State columns: where the rows of a step find states of recurrent layers, and where the step keeps them.

Says what each row keeps before its pages are reserved, and once they are, makes the columns of a plan. Called by the
planner.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from roost.kv.lease import PLANNED, Lease, StateKind
from roost.kv.pages import NULL_PAGE
from roost.kv.wanted_states import wanted_of_chunk, wanted_of_round
from roost.sched.request import Request
from roost.sched.state import State
from roost.step import KEPT_STATES, StateColumns

NO_STATES: Mapping[int, StateKind] = {}


def states_to_keep(state: State, request: Request, chunk: int) -> Mapping[int, StateKind]:
    """What the next step of a request keeps, by position: of a round, only where its drafts have no say."""
    states, lease = state.store.states, request.lease
    if states is None:
        return NO_STATES
    if not chunk:
        return wanted_of_round(states, lease, lease.claimed_len)
    end = lease.device_len_max + chunk
    return wanted_of_chunk(states, lease, end, is_final=end == request.turn.prefill_len)


def state_columns(state: State, leases: Sequence[Lease]) -> StateColumns | None:
    """The columns of a plan; None if the model has no recurrent layers."""
    states = state.store.states
    if states is None:
        return None
    sources, starts = (np.zeros(len(leases), dtype=np.int32) for _ in range(2))
    kept_at, kept_in = (np.full((len(leases), KEPT_STATES), none, dtype=np.int32) for none in (-1, NULL_PAGE))
    for i, lease in enumerate(leases):
        position = starts[i] = states.last_at(lease, PLANNED)
        if position in lease.states:
            sources[i] = lease.states[position].page
        elif position:
            sources[i] = lease.tree_states[position].state
        planned = [(at, kept.page) for at, kept in lease.states.items() if kept.step == PLANNED]
        for number, (at, page) in enumerate(planned):
            kept_at[i, number], kept_in[i, number] = at, page
    return StateColumns(sources=sources, starts=starts, kept_at=kept_at, kept_in=kept_in)
