"""Sharing: how the prefill of a step is divided among the prompts that wait for it.

Higher priorities first. Then equal parts for the clients that have prompts, as far as each can use its own. A client's
part goes to its prompts in line; but half of it to shorter ones than the first, the shortest before the others, if
there are any. So the first always goes on, and a short prompt waits for shorter ones and never for long ones. Plain
arithmetic. Called by the planner.
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
    """Tokens for each of some prompts, which are in line: by priority, then by arrival; `budget` in all, at most."""
    shares = [0] * len(prompts)
    for _, group in groupby(range(len(prompts)), key=lambda number: prompts[number].priority):
        by_client: dict[str, list[int]] = {}
        for number in group:
            by_client.setdefault(prompts[number].client, []).append(number)
        sizes = {client: sum(prompts[number].remaining for number in own) for client, own in by_client.items()}
        served = list(by_client)[: max(1, budget)]  # not a token for each: who came first
        clients = sorted(served, key=lambda client: sizes[client])  # what one does not need, the others have
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
        more = min(prompts[first].remaining - shares[first], part)  # what shorter ones have left
        shares[first] += more
        part -= more
        own = [number for number in others if number not in shorter]
