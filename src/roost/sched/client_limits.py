"""Client limits: how many requests and sessions each client may have, and in which order clients are admitted.

What a client has is counted from the queue and the tables each time, so no counter can leak. A client without a name,
or without limits of its own, has only those of the engine. Called by intake, admission and session commands.
"""

from collections import Counter

from roost.clients import ClientLimits
from roost.errors import CapacityError, RequestError
from roost.messages import Submit
from roost.sched.request import Request
from roost.sched.state import State

_NONE = ClientLimits(name="")


def limits_of(state: State, client: str) -> ClientLimits:
    """The limits of a client."""
    return state.resolved.clients.get(client, _NONE)


def check_priority(state: State, submit: Submit) -> None:
    """Raise RequestError for a priority that this client may not ask for."""
    limits, priority = limits_of(state, submit.client), submit.priority
    low = priority if limits.priority_min is None else limits.priority_min
    high = priority if limits.priority_max is None else limits.priority_max
    if not low <= priority <= high:
        least = "" if limits.priority_min is None else f"at least {low}"
        most = "" if limits.priority_max is None else f"at most {high}"
        allowed = " and ".join(bound for bound in (least, most) if bound)
        raise RequestError(403, "priority", f"must be {allowed} for this key, got {priority}")


def check_queued(state: State, client: str) -> None:
    """Raise CapacityError if a client already has as many requests waiting as it may."""
    most = limits_of(state, client).queued
    if most is None:
        return
    num_waiting = sum(each.submit.client == client and each.row is None for each in state.requests.values())
    if num_waiting >= most:
        raise CapacityError(429, f"{num_waiting} requests of this key wait: it may have {most}")


def check_sessions(state: State, client: str) -> None:
    """Raise CapacityError if a client already has as many sessions as it may."""
    most = limits_of(state, client).sessions
    if most is None:
        return
    num_open = sum(session.client == client for session in state.sessions.table.values())
    if num_open >= most:
        raise CapacityError(429, f"{num_open} sessions of this key are open: it may have {most}")


def admission_order(state: State) -> list[Request]:
    """The requests that may start, in order: as queued; where clients have names, fewest running requests first."""
    if not state.resolved.clients:
        return state.queued
    num_running = Counter(each.submit.client for each in state.running)

    def may_run(request: Request) -> bool:
        most = limits_of(state, request.submit.client).running
        return most is None or num_running[request.submit.client] < most

    def place(request: Request) -> tuple[int, int, int]:
        return -request.submit.priority, num_running[request.submit.client], request.arrival

    return sorted(filter(may_run, state.queued), key=place)
