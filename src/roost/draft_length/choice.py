"""Draft-length policy: how many tokens the rounds of a step draft (`--spec-steps auto`).

Learns how often the draft at each place is accepted if all before it are, and what steps of each width cost. Chooses
the width with the most tokens per unit of time. Now and then it tries another width, so that a change of text, load or
machine is noticed; the time lost to trials is bounded. Deterministic, without a clock. Part of the scheduler's state;
asked by the planner, fed by planner and settle.
"""

from collections.abc import Sequence

from roost.draft_length.costs import NUM_KNOWN, Costs
from roost.draft_length.lookups import Repeat
from roost.graph_sizes import batch_sizes
from roost.spec_widths import Widths
from roost.step_times.median import NUM_KEPT
from roost.step_times.times import StepTimes, TimedStep

_FIRST_SHARE = 0.7  # of drafts assumed to be accepted before any was seen
_MEMORY = 1 - 1 / 32  # factor by which each step reduces the weight of earlier ones
_TRIAL_SHARE = 0.02  # of the time that trials may cost
_TRIALS_MAX = 2.0  # most credit for trials, in steps; also what there is at the start
_TRIAL_LEAST = 0.1  # least price of a trial, in steps, so that trials do not follow each other
_NEAR = 0.9  # of the best rate: a width that comes so close is measured until its median is full
_DRAFTED_WITHIN = 64  # steps after which drafts are tried again where they do not pay


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

    def __init__(self, widths: Widths, rounds_max: int, times: StepTimes) -> None:
        self._widths, self._times = widths, times
        self._acceptance = Acceptance(max(1, widths.shape.steps))
        self._costs = Costs(batch_sizes(rounds_max))
        self._num_steps = 0  # planned
        self._drafted_at = 0  # number of the last step with drafts
        self._credit = _TRIALS_MAX
        self._price = 0.0  # of the last choice, if it was a trial

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

    def widen(self, num_rounds: int, width: int, repeats: Sequence[Repeat]) -> tuple[int, list[int]]:
        """A wider width for some of those of so many rounds that repeat a text, and which; the others' is `width`."""
        wide = self._widths.wide_of(num_rounds)
        if not wide or not repeats or width == 1:
            return width, []
        narrow, *costs = self._costs.of(num_rounds, (width, *wide), has_chunks=False)
        usual = self._acceptance.tokens(width)[-1]
        before = [each.tokens(width, usual) for each in repeats]
        tokens = (num_rounds - len(repeats)) * usual + sum(before)
        best, found = tokens / narrow, (width, list[int]())
        for each, cost in zip(wide, costs, strict=True):
            gains = [repeat.tokens(each, usual) - old for repeat, old in zip(repeats, before, strict=True)]
            order = sorted(range(len(gains)), key=lambda number: -gains[number])
            total = tokens
            for place, number in enumerate(order, 1):
                total += gains[number]
                rate = total / (narrow + place / num_rounds * (cost - narrow))
                if rate > best:
                    best, found = rate, (each, order[:place])
        return found

    def shortens_chunks(self, num_rounds: int) -> bool:
        """Whether the next step should carry a shorter chunk, to tell the cost of prefill from that of the rounds."""
        has_choice = num_rounds > 0 and len(self._widths.of(num_rounds)) > 1
        return has_choice and self._times.prompt_tokens.wants_pair

    def planned(self, num_rounds: int, width: int) -> None:
        """A step was planned, with the width just chosen."""
        if num_rounds:
            self._num_steps += 1
            self._drafted_at = self._num_steps if width > 1 else self._drafted_at
            self._credit = min(_TRIALS_MAX, self._credit + _TRIAL_SHARE - self._price)

    def collected(self, step: TimedStep, accept_lens: list[int], wide: int = 0, num_wide: int = 0) -> None:
        """A step was collected; `accept_lens` are those of its live rounds, but for the `num_wide` of width `wide`."""
        if not step.num_rounds:
            return
        self._acceptance.note(step.width - 1 if accept_lens else 0, accept_lens)
        if step.time and step.is_alone:
            self._note_alone(step, wide, num_wide)
        elif step.time:
            rest = self._times.prompt_tokens.rest(step.num_tokens, step.time)
            if rest is not None:
                self._costs.note_busy(step.num_rounds, step.width, rest, has_chunks=step.num_tokens > 0)

    def _note_alone(self, step: TimedStep, wide: int, num_wide: int) -> None:
        """Take in the time of a step of rounds alone; of one with both widths what the narrow one would have taken."""
        if num_wide == step.num_rounds:
            self._costs.note(step.num_rounds, wide, step.time)
            return
        time, part = step.time, num_wide / step.num_rounds
        if num_wide:
            narrow, widened = self._costs.of(step.num_rounds, (step.width, wide), has_chunks=False)
            time = max(1, round(time * narrow / (narrow + part * (widened - narrow))))
        self._costs.note(step.num_rounds, step.width, time)

    def _tells(self, num_rounds: int, has_prefill: bool) -> bool:
        """Whether the next step's cost will probably count, so that a trial teaches something."""
        if self._costs.takes_busy(num_rounds):
            return True
        return not (has_prefill or self._times.has_chunks_around)

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
