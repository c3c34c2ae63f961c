"""Chunked prefill: how the prefill tokens of a step are divided among the prompts that wait for them.

Higher priorities come first. Within a priority, every client with a prompt gets an equal part, as far as it can use
it. Of a client's part, its first prompt in the queue gets everything; or half, if shorter prompts wait behind it, which
get the other half, shortest first. So the first prompt always makes progress, and a short prompt never waits for a
longer one. Plain arithmetic. Called by the planner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt of which tokens are left to prefill, in its place in the queue."""

    priority: int
    client: str
    remaining: int  # tokens that no step has taken yet


def prefill_shares(prompts: Sequence[WaitingPrompt], budget: int) -> list[int]:
    """Tokens that each prompt may run in this step, `budget` in all; prompts come by priority, then by arrival."""
    shares = [0] * len(prompts)
    for _, group in groupby(range(len(prompts)), key=lambda number: prompts[number].priority):
        by_client: dict[str, list[int]] = {}
        for number in group:
            by_client.setdefault(prompts[number].client, []).append(number)
        sizes = {client: sum(prompts[number].remaining for number in own) for client, own in by_client.items()}
        served = list(by_client)[: max(1, budget)]  # fewer tokens than clients: those who came first
        clients = sorted(served, key=lambda client: sizes[client])  # what one client does not need goes to the next
        for number, client in enumerate(clients):
            part = min(sizes[client], -(-budget // (len(clients) - number)))
            _share(prompts, by_client[client], part, shares)
            budget -= part
    return shares


def _share(prompts: Sequence[WaitingPrompt], own: list[int], part: int, shares: list[int]) -> None:
    """Divide a client's part among its prompts."""
    while own and part:
        first, *others = own
        shorter = [number for number in others if prompts[number].remaining < prompts[first].remaining]
        shares[first] = min(prompts[first].remaining, -(-part // 2) if shorter else part)
        part -= shares[first]
        for number in sorted(shorter, key=lambda number: prompts[number].remaining):
            shares[number] = min(prompts[number].remaining, part)
            part -= shares[number]
        more = min(prompts[first].remaining - shares[first], part)  # what the shorter ones have left over
        shares[first] += more
        part -= more
        own = [number for number in others if number not in shorter]
