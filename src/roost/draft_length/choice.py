"""Drafting: how many tokens the rounds of a step draft, by what drafts have brought and what steps have cost.

Learns how often the draft at each place is accepted once those before it are, chooses the width that adds most tokens
in a time, and now and then tries another one, so that a change of text, load or machine is noticed: what trials lose is
kept below a share of the time. Has no clock and no chance in it. Part of the state; asked by the planner, told by the
planner and settle.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roost.draft_length.costs import NUM_KEPT, NUM_KNOWN, Costs
from roost.draft_length.prefill_costs import ChunkCost
from roost.spec_widths import Widths, batch_sizes
from roost.step import StepId

_FIRST_SHARE = 0.7  # of drafts accepted, before any was seen
_MEMORY = 1 - 1 / 32  # what a step leaves of the weight of those before it
_TRIAL_SHARE = 0.02  # of the time, for trials
_TRIALS_MAX = 2.0  # steps that may be lost to trials at once; so many at the start
_TRIAL_LEAST = 0.1  # steps that a trial is charged at least, so that trials are apart
_NEAR = 0.9  # of the best rate: a width that comes so close is measured as often as is kept
_DRAFTED_WITHIN = 64  # steps: drafts are tried this often where none pay


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that is out."""

    num_rounds: int
    width: int
    num_chunk_tokens: int  # of prompts, beside the rounds
    is_steady: bool  # planned as soon as a step was collected, with as many out as there may be


class Acceptance:
    """By place among the drafts, how often one is accepted if all before it are: shares that forget."""

    def __init__(self, num_places: int) -> None:
        self._shares = [_FIRST_SHARE] * num_places
        self._weights = [1.0] + [0.0] * (num_places - 1)  # of one step each, at most

    def note(self, num_drafts: int, accept_lens: list[int]) -> None:
        """A step's rounds accepted so many tokens each, bonus included; without rounds or drafts, time has passed."""
        self._weights = [weight * _MEMORY for weight in self._weights]
        self._weights[0] = max(1.0, self._weights[0])  # a trial among many steps moves the first place by half at most
        offered = len(accept_lens)  # rounds in which all drafts before a place were accepted
        for place in range(num_drafts):
            accepted = offered - accept_lens.count(place + 1)
            weight, new = self._weights[place], offered / len(accept_lens)
            self._shares[place] = (self._shares[place] * weight + accepted / offered * new) / (weight + new)
            self._weights[place] = weight + new
            if not accepted:
                return
            offered = accepted

    def tokens(self, width: int) -> list[float]:
        """Tokens that rounds of 1, 2, … `width` nodes add; a place not seen lately is like the one before it."""
        found, reached, share = [1.0], 1.0, self._shares[0]
        for own, weight in zip(self._shares[: width - 1], self._weights, strict=False):
            share = (own * weight + share) / (weight + 1)
            reached *= share
            found.append(found[-1] + reached)
        return found


class DraftLengthPolicy:
    """What is known about drafts, and what is chosen."""

    def __init__(self, widths: Widths, rounds_max: int, depth: int) -> None:
        self._widths, self._depth = widths, depth
        self._acceptance = Acceptance(max(1, widths.shape.steps))
        self._costs = Costs(batch_sizes(rounds_max))
        self._chunks = ChunkCost()
        self._num_steps = 0  # planned
        self._drafted_at = 0  # step that last carried drafts
        self._credit = _TRIALS_MAX
        self._price = 0.0  # of the last choice
        self._out: dict[StepId, Planned] = {}
        self._collected_at: int | None = None  # time of the last step; None: there was none, or it broke
        self._collected_chunks = True  # whether that had some

    def choose(self, num_rounds: int, *, has_prefill: bool) -> int:
        """The width of a step's rounds. Asking again gives the same answer."""
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
        lost = costs[trial] * (1 - rates[trial] / rates[best]) / costs[best]  # steps like the best
        price = min(_TRIALS_MAX, max(_TRIAL_LEAST, lost))
        if price > self._credit:
            return menu[best]
        self._price = price
        return menu[trial]

    def shortens_chunks(self, num_rounds: int) -> bool:
        """Whether a step of rounds should carry less prefill than it could, to tell the one's cost from the other's."""
        return num_rounds > 0 and len(self._widths.of(num_rounds)) > 1 and self._chunks.wants_pair

    def planned(
        self, step: StepId, num_rounds: int, width: int, *, num_chunk_tokens: int, num_out: int, now: int
    ) -> None:
        """A step was planned, with the width just chosen (0: no rounds), while `num_out` steps are out."""
        is_steady = num_out == self._depth and now == self._collected_at
        self._out[step] = Planned(num_rounds, width, num_chunk_tokens, is_steady)
        if num_rounds:
            self._num_steps += 1
            self._drafted_at = self._num_steps if width > 1 else self._drafted_at
            self._credit = min(_TRIALS_MAX, self._credit + _TRIAL_SHARE - self._price)

    def collected(self, step: StepId, accept_lens: list[int], now: int) -> None:
        """A step's live rounds accepted so many tokens each.

        From the end of the step before to its own is what it cost, if the loop did not rest in between: at depth 0 host
        and device one after the other, at depth 1 the slower of them. The host's work for a step may fall in the time
        of the one before: so rounds are measured among rounds, or where chunks are all around.
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
        """All steps that were out are void."""
        self._out.clear()
        self._collected_at = None

    def _measured(self, step: Planned, time: int, is_alone: bool) -> None:
        """A step took some time."""
        self._chunks.note(step.num_rounds, step.width, step.num_chunk_tokens, time)
        if is_alone:
            self._costs.note(step.num_rounds, step.width, time)
        elif step.num_rounds:
            rest = self._chunks.rest(step.num_chunk_tokens, time)
            if rest is not None:
                has_chunks = step.num_chunk_tokens > 0
                self._costs.note_busy(step.num_rounds, step.width, rest, has_chunks=has_chunks)

    def _tells(self, num_rounds: int, has_prefill: bool) -> bool:
        """Whether what the next step costs will be noted, as far as one can see."""
        if self._costs.takes_busy(num_rounds):
            return True
        return not (has_prefill or self._collected_chunks or any(each.num_chunk_tokens for each in self._out.values()))

    def _trial(
        self, menu: Sequence[int], tokens: list[float], costs: list[float], num_samples: list[int]
    ) -> int | None:
        """Which of the menu may be better than the best, for all that is known; None if there is none."""
        rates = [tokens[width - 1] / cost for width, cost in zip(menu, costs, strict=True)]
        best = rates.index(max(rates))
        if num_samples[best] < NUM_KNOWN:
            return None  # first things first
        found, floor = [], 0.0  # no width costs less than a narrower one
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
