"""Draft-length policy: how many tokens the rounds of a step draft (`--spec-steps auto`).

Learns how often the draft at each place is accepted if all before it are, and what steps of each width cost. Chooses
the width with the most tokens per unit of time. Now and then it tries another width, so that a change of text, load or
machine is noticed; the time lost to trials is bounded. Deterministic, without a clock. Part of the scheduler's state;
asked by the planner, fed by planner and settle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roost.draft_length.costs import NUM_KEPT, NUM_KNOWN, Costs
from roost.draft_length.prefill_costs import ChunkCost
from roost.graph_sizes import batch_sizes
from roost.spec_widths import Widths
from roost.step import StepId

_FIRST_SHARE = 0.7  # of drafts assumed to be accepted before any was seen
_MEMORY = 1 - 1 / 32  # factor by which each step reduces the weight of earlier ones
_TRIAL_SHARE = 0.02  # of the time that trials may cost
_TRIALS_MAX = 2.0  # most credit for trials, in steps; also what there is at the start
_TRIAL_LEAST = 0.1  # least price of a trial, in steps, so that trials do not follow each other
_NEAR = 0.9  # of the best rate: a width that comes so close is measured until its median is full
_DRAFTED_WITHIN = 64  # steps after which drafts are tried again where they do not pay


@dataclass(frozen=True, slots=True)
class Planned:
    """A step in flight."""

    num_rounds: int
    width: int
    num_chunk_tokens: int  # prefill tokens beside the rounds
    is_steady: bool  # planned as soon as a step was collected, with the usual number of steps in flight


class Acceptance:
    """For each place among the drafts, how often a draft is accepted if all before it are; recent steps count most."""

    def __init__(self, num_places: int) -> None:
        self._shares = [_FIRST_SHARE] * num_places
        self._weights = [1.0] + [0.0] * (num_places - 1)  # in steps; a step adds at most 1

    def note(self, num_drafts: int, accept_lens: list[int]) -> None:
        """Take in the accept lengths of a step's rounds, bonus included; a step without drafts only ages the shares."""
        self._weights = [weight * _MEMORY for weight in self._weights]
        self._weights[0] = max(1.0, self._weights[0])  # so a single trial moves the first share half-way at most
        offered = len(accept_lens)  # rounds in which all drafts before this place were accepted
        for place in range(num_drafts):
            accepted = offered - accept_lens.count(place + 1)
            weight, new = self._weights[place], offered / len(accept_lens)
            self._shares[place] = (self._shares[place] * weight + accepted / offered * new) / (weight + new)
            self._weights[place] = weight + new
            if not accepted:
                return
            offered = accepted

    def tokens(self, width: int) -> list[float]:
        """Expected tokens that rounds of 1, 2, … `width` nodes add; a place not seen lately is like the one before."""
        found, reached, share = [1.0], 1.0, self._shares[0]
        for own, weight in zip(self._shares[: width - 1], self._weights, strict=False):
            share = (own * weight + share) / (weight + 1)
            reached *= share
            found.append(found[-1] + reached)
        return found


class DraftLengthPolicy:
    """What was learned about drafts, and the choice of the next width."""

    def __init__(self, widths: Widths, rounds_max: int, depth: int) -> None:
        self._widths, self._depth = widths, depth
        self._acceptance = Acceptance(max(1, widths.shape.steps))
        self._costs = Costs(batch_sizes(rounds_max))
        self._chunks = ChunkCost()
        self._num_steps = 0  # planned
        self._drafted_at = 0  # number of the last step with drafts
        self._credit = _TRIALS_MAX
        self._price = 0.0  # of the last choice, if it was a trial
        self._out: dict[StepId, Planned] = {}
        self._collected_at: int | None = None  # when the last step was collected; None: there was none, or it failed
        self._collected_chunks = True  # whether that step had prefill chunks

    def choose(self, num_rounds: int, *, has_prefill: bool) -> int:
        """The width of the next step's rounds. Asking again gives the same answer."""
        menu = self._widths.of(num_rounds)
        self._price = 0.0
        if len(menu) == 1:
            return menu[0]
        tokens, costs = self._acceptance.tokens(menu[-1]), self._costs.of(num_rounds, menu, has_chunks=has_prefill)
        rates = [tokens[width - 1] / cost for width, cost in zip(menu, costs, strict=True)]
        best = rates.index(max(rates))
        num_samples = self._costs.num_samples(num_rounds, menu, has_chunks=has_prefill)
        trial = self._trial(menu, tokens, costs, num_samples) if self._tells(num_rounds, has_prefill) else None
        if trial is None:
            return menu[best]
        lost = costs[trial] * (1 - rates[trial] / rates[best]) / costs[best]  # in steps of the best width
        price = min(_TRIALS_MAX, max(_TRIAL_LEAST, lost))
        if price > self._credit:
            return menu[best]
        self._price = price
        return menu[trial]

    def shortens_chunks(self, num_rounds: int) -> bool:
        """Whether the next step should carry a shorter chunk, to tell the cost of prefill from that of the rounds."""
        return num_rounds > 0 and len(self._widths.of(num_rounds)) > 1 and self._chunks.wants_pair

    def planned(
        self, step: StepId, num_rounds: int, width: int, *, num_chunk_tokens: int, num_out: int, now: int
    ) -> None:
        """A step was planned, with the width just chosen (0: no rounds), while `num_out` steps are in flight."""
        is_steady = num_out == self._depth and now == self._collected_at
        self._out[step] = Planned(num_rounds, width, num_chunk_tokens, is_steady)
        if num_rounds:
            self._num_steps += 1
            self._drafted_at = self._num_steps if width > 1 else self._drafted_at
            self._credit = min(_TRIALS_MAX, self._credit + _TRIAL_SHARE - self._price)

    def collected(self, step: StepId, accept_lens: list[int], now: int) -> None:
        """A step was collected; `accept_lens` are those of its live rounds.

        Its cost is the time from the end of the step before to its own end, if the loop did not idle in between: at
        depth 0 host and device time together, at depth 1 the longer of the two. The host's work for a step may fall
        into the time of the step before. So a step counts only if its neighbours are like it: all of them with prefill
        chunks, or all without.
        """
        mine = self._out.pop(step)
        if mine.num_rounds:
            self._acceptance.note(mine.width - 1 if accept_lens else 0, accept_lens)
        around = {self._collected_chunks, *(each.num_chunk_tokens > 0 for each in self._out.values())}
        is_alone = around == {False} and not mine.num_chunk_tokens
        is_telling = mine.is_steady and (is_alone or around == {True})
        if is_telling and self._collected_at is not None and now > self._collected_at:
            self._measured(mine, now - self._collected_at, is_alone)
        self._collected_at, self._collected_chunks = now, mine.num_chunk_tokens > 0

    def failed(self) -> None:
        """All steps in flight are void."""
        self._out.clear()
        self._collected_at = None

    def _measured(self, step: Planned, time: int, is_alone: bool) -> None:
        """Take in the time of a step."""
        self._chunks.note(step.num_rounds, step.width, step.num_chunk_tokens, time)
        if is_alone:
            self._costs.note(step.num_rounds, step.width, time)
        elif step.num_rounds:
            rest = self._chunks.rest(step.num_chunk_tokens, time)
            if rest is not None:
                has_chunks = step.num_chunk_tokens > 0
                self._costs.note_busy(step.num_rounds, step.width, rest, has_chunks=has_chunks)

    def _tells(self, num_rounds: int, has_prefill: bool) -> bool:
        """Whether the next step's cost will probably count, so that a trial teaches something."""
        if self._costs.takes_busy(num_rounds):
            return True
        return not (has_prefill or self._collected_chunks or any(each.num_chunk_tokens for each in self._out.values()))

    def _trial(
        self, menu: Sequence[int], tokens: list[float], costs: list[float], num_samples: list[int]
    ) -> int | None:
        """Index of a width that may turn out better than the best, or None."""
        rates = [tokens[width - 1] / cost for width, cost in zip(menu, costs, strict=True)]
        best = rates.index(max(rates))
        if num_samples[best] < NUM_KNOWN:
            return None  # measure the best one first
        found, floor = [], 0.0  # least cost: no width is cheaper than a narrower one
        for number, width in enumerate(menu):
            if num_samples[number] >= NUM_KNOWN:
                floor = max(floor, costs[number])
                if number != best and num_samples[number] < NUM_KEPT and rates[number] > _NEAR * rates[best]:
                    found.append(number)
            elif tokens[width - 1] > rates[best] * floor:
                found.append(number)
        if found:
            return max(found, key=lambda number: rates[number])
        return 1 if self._num_steps - self._drafted_at >= _DRAFTED_WITHIN else None  # the shortest drafts
