"""Draft-length policy: how many tokens the rounds of a step draft (`--spec-steps auto`), and who drafts them.

Learns how often the draft at each place is accepted if all before it are, and what steps of each width cost. Chooses
the width with the most tokens per unit of time; for each row, and each length that a lookup may match, whether what was
looked up is worth more than that, and how much of it. Now and then it tries another width, so that a change of text,
load or machine is noticed; the time lost to trials is bounded. Deterministic, without a clock. Part of the scheduler's
state; asked by the planner, fed by planner and settle.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from roost.draft_length.costs import NUM_KNOWN, Costs
from roost.draft_length.lookups import NEVER, Lookups, Repeat, RowDrafts, Share, class_of, tokens_of
from roost.draft_length.uneven_times import UnevenTimes
from roost.draft_length.work_times import Work, WorkTimes
from roost.graph_sizes import batch_sizes
from roost.spec_shape import MATCH_MAX
from roost.spec_widths import Widths
from roost.step_times.median import NUM_KEPT
from roost.step_times.times import StepTimes, TimedStep

_FIRST_SHARE = 0.7  # of drafts assumed to be accepted before any was seen
_MEMORY = 1 - 1 / 32  # factor by which each step reduces the weight of earlier ones
_TRIAL_SHARE = 0.02  # of the time that trials may cost
_TRIALS_MAX = 2.0  # most credit for trials, in steps; also what there is at the start
_TRIAL_LEAST = 0.1  # least price of a trial, in steps, so that trials do not follow each other
_NEAR = 0.9  # of the best rate: a width that comes so close is measured until its median is full
# of its tokens by which a lookup must be better than the head: what was seen of few rounds is often luck
_EDGE = 0.1
_STEP = 64  # parts of 1 to which shares are rounded, so that rows can share what follows from them
_DECIDED_FOR = 8  # rounds of a row for which a decision stands
_TRIED_WITHIN = 64  # steps after which drafts are tried again where they do not pay, or none where they do


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
        self._batch_sizes = batch_sizes(rounds_max)
        self._costs, self._work = Costs(self._batch_sizes), WorkTimes(self._batch_sizes)
        self._uneven, self._recent = UnevenTimes(self._batch_sizes), _Recent()
        self.lookups = Lookups(widths.shape.depth_max)
        self._num_steps = 0  # planned
        self._drafted_at = self._undrafted_at = 0  # numbers of the last steps with drafts of the head, and without
        self._credit = _TRIALS_MAX
        self._price = 0.0  # of the last choice, if it was a trial

    def choose(self, num_rounds: int, *, has_prefill: bool) -> int:
        """The width of the next step's rounds. Asking again gives the same answer."""
        menu = self._widths.of(num_rounds)
        self._price = 0.0
        if len(menu) == 1 or (self._widths.narrows and not self._widths.shape.pair):
            return menu[0]  # the narrowest: what is looked up is wider where it is worth it
        if self._widths.narrows and num_rounds > 1:
            return self._choose_beside_lookups(num_rounds, menu)
        tokens, costs = self._acceptance.tokens(menu[-1]), self._costs.of(num_rounds, menu, has_chunks=has_prefill)
        rates = [tokens[width - 1] / cost for width, cost in zip(menu, costs, strict=True)]
        best = rates.index(max(rates))
        num_samples = self._costs.num_samples(num_rounds, menu, has_chunks=has_prefill)
        trial = self._trial(menu, tokens, costs, num_samples) if self._tells(num_rounds, has_prefill) else None
        return menu[best] if trial is None else self._paid(menu, rates, costs, best, trial)

    def _choose_beside_lookups(self, num_rounds: int, menu: Sequence[int]) -> int:
        """The width of those that are not looked up, where as many are as lately, with as many nodes as these had."""
        recent, head = self._recent, self._acceptance.tokens(menu[-1])
        others, found = num_rounds * (1 - recent.share), num_rounds * recent.share
        more = found * (recent.nodes - 1)
        times = [self._work.of(num_rounds, _work(others, width, more, recent.any_share)) for width in menu]
        tokens = [found * recent.tokens + others * head[width - 1] for width in menu]
        rates = [each / time for each, time in zip(tokens, times, strict=True)]
        best = rates.index(max(rates))
        # what no step shows, a fit makes up: it is asked for drafts, and for none, now and then
        tried_at, other = (self._undrafted_at, 0) if menu[best] > 1 else (self._drafted_at, 1)
        if self._num_steps - tried_at < _TRIED_WITHIN:
            return menu[best]
        return self._paid(menu, rates, times, best, other)

    def _paid(self, menu: Sequence[int], rates: Sequence[float], costs: Sequence[float], best: int, trial: int) -> int:
        """The width to try, if there is credit for what it loses; else the best."""
        lost = costs[trial] * (1 - rates[trial] / rates[best]) / costs[best]  # in steps of the best width
        price = min(_TRIALS_MAX, max(_TRIAL_LEAST, lost))
        if price > self._credit:
            return menu[best]
        self._price = price
        return menu[trial]

    def lookup_widths(self, rows: Sequence[RowDrafts], width: int, widest: Sequence[int]) -> list[list[int]]:
        """For each round of a step, and each length of a match: nodes of what was looked up; 0: the head drafts.

        Rounds that the head drafts for verify `width` nodes; others `widest` of each, all or none, unless the length is
        chosen and rounds are narrowed to what was drafted: then any width up to that.
        """
        worth: _Worth | None = None
        size, found = bisect_left(self._batch_sizes, len(rows)), []
        for row, most in zip(rows, widest, strict=True):
            load = (size, width, most) if self._widths.narrows else (width, most)
            by = row.num_noted // _DECIDED_FOR, class_of(row.repeat_len)
            decided = row.decided.get(load)
            if decided is None or decided[0] != by:
                if worth is None and self._widths.narrows:
                    worth = _Worth(self, len(rows), width)
                decided = row.decided[load] = by, self._of_row(row, width, most, worth)
            found.append(decided[1])
        return found

    def _of_row(self, row: RowDrafts, width: int, most: int, worth: "_Worth | None") -> list[int]:
        found = [0]
        for match_len in range(1, MATCH_MAX + 1):
            if match_len > 1 and match_len < MATCH_MAX and class_of(match_len) == class_of(match_len - 1):
                found.append(found[-1])
                continue
            seen_len = max(match_len, row.repeat_len) if match_len == MATCH_MAX else match_len
            share = self.lookups.lookup_share(row, seen_len)
            head_share = self.lookups.head_share(row, match_len) if self._widths.shape.pair else NEVER
            if worth is not None:
                wanted = min(most, worth.width(share, head_share))
                found.append(wanted if wanted > 1 else 0)
            else:
                is_better = tokens_of(share, most) * (1 - _EDGE) > tokens_of(head_share, width)
                found.append(most if is_better else 0)
        return found

    def repeat(self, row: RowDrafts, unknown_len: int) -> Repeat:
        """A row that was last seen to repeat a text, with so many tokens in flight that may be added since."""
        return Repeat(self.lookups.lookup_share(row, row.repeat_len), unknown_len)

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
                rate = total / self._of_several_widths(num_rounds, place, narrow, cost)
                if rate > best:
                    best, found = rate, (each, order[:place])
        return found

    def _of_several_widths(self, num_rounds: int, num_wide: int, narrow: float, wide: float) -> float:
        """Cost of a step of which so many rounds are wide, by the costs of those in which none and all are."""
        uneven = self._uneven.of(num_rounds, self._num_steps) if num_wide < num_rounds else 1.0
        return uneven * (narrow + num_wide / num_rounds * (wide - narrow))

    def menu_of(self, num_rounds: int) -> tuple[int, ...]:
        """Widths that looked-up drafts may have in a step of so many rounds."""
        return self._widths.of(num_rounds) + self._widths.wide_of(num_rounds)

    def tokens_of(self, width: int) -> float:
        """Tokens that a round of that width adds, as far as is known."""
        return self._acceptance.tokens(width)[-1]

    def costs_of(self, num_rounds: int, widths: Sequence[int]) -> list[float]:
        """Costs of such rounds in a step without prompts."""
        return self._costs.of(num_rounds, widths, has_chunks=False)

    def prices(self, num_rounds: int, width: int) -> tuple[float, float, float]:
        """Tokens that several rounds would add in the time of a node more, and of a token that the head drafts.

        Last, in what it takes that a step has more nodes than rounds, as far as this round alone would be the reason.
        """
        recent, num_rounds = self._recent, max(2, num_rounds)
        others, found = num_rounds * (1 - recent.share), num_rounds * recent.share
        tokens = found * recent.tokens + others * self.tokens_of(width)
        rate = tokens / self._work.of(num_rounds, _work(others, width, found * (recent.nodes - 1), recent.any_share))
        alone = 0.0 if width > 1 else 1 - recent.any_share
        times = self._work.of_node(num_rounds), self._work.of_draft(num_rounds), alone * self._work.of_wider(num_rounds)
        return rate * times[0], rate * times[1], rate * times[2]

    def shortens_chunks(self, num_rounds: int) -> bool:
        """Whether the next step should carry a shorter chunk, to tell the cost of prefill from that of the rounds."""
        has_choice = num_rounds > 0 and len(self._widths.of(num_rounds)) > 1
        return has_choice and self._times.prompt_tokens.wants_pair

    def planned(self, num_rounds: int, width: int) -> None:
        """A step was planned, with the width just chosen."""
        if num_rounds:
            self._num_steps += 1
            if width > 1:
                self._drafted_at = self._num_steps
            else:
                self._undrafted_at = self._num_steps
            self._credit = min(_TRIALS_MAX, self._credit + _TRIAL_SHARE - self._price)

    def collected(
        self,
        step: TimedStep,
        accept_lens: list[int],
        looked_up: Sequence[tuple[int, int]] = (),
        wide: Sequence[int] = (),
    ) -> None:
        """A step was collected: `accept_lens` of its live rounds, but for those whose drafts were looked up.

        Of these the nodes and the accept length of each; and the nodes of those that were planned wider than others.
        """
        if not step.num_rounds:
            return
        self._acceptance.note(step.width - 1 if accept_lens else 0, accept_lens)
        self._recent.note(len(accept_lens), looked_up)
        if step.time and step.is_alone and self._widths.narrows:
            self._note_narrowed(step, looked_up)
        elif step.time and step.is_alone:
            self._note_widened(step, wide)
        elif step.time:
            rest = self._times.prompt_tokens.rest(step.num_tokens, step.time)
            if rest is not None:
                self._costs.note_busy(step.num_rounds, step.width, rest, has_chunks=step.num_tokens > 0)

    def _note_narrowed(self, step: TimedStep, looked_up: Sequence[tuple[int, int]]) -> None:
        """Take in the time of a step of rounds alone, of which some were looked up."""
        number, width, nodes = step.num_rounds, step.width, [each for each, _ in looked_up]
        if number > 1:
            more = sum(nodes) - len(nodes)
            self._work.note(number, _work(number - len(nodes), width, more, float(more > 0)), step.time)
        else:
            self._costs.note(number, _all_looked_up(nodes[0]) if nodes else width, step.time)

    def _note_widened(self, step: TimedStep, wide: Sequence[int]) -> None:
        """Take in the time of a step of rounds alone, of which some may have been planned wider than the others."""
        number, widest = step.num_rounds, max(wide, default=step.width)
        if len(wide) in (0, number):
            self._costs.note(number, widest, step.time)
            return
        pace, (narrow, cost) = self._costs.pace(number), self._costs.of(number, (step.width, widest), has_chunks=False)
        if pace:
            expected = pace * (narrow + len(wide) / number * (cost - narrow))
            self._uneven.note(number, step.time / expected, self._num_steps)

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
        return 1 if self._num_steps - self._drafted_at >= _TRIED_WITHIN else None  # the shortest drafts


class _Recent:
    """How many rounds were looked up lately, and what they brought and verified."""

    def __init__(self) -> None:
        self._rounds, self._looked_up, self._tokens, self._nodes = 1.0, 0.0, 0.0, 0.0
        self._steps, self._with_any = 1.0, 0.0

    def note(self, num_others: int, looked_up: Sequence[tuple[int, int]]) -> None:
        """Take in a step: nodes and accept length of each round that was looked up, and how many were not."""
        self._rounds = self._rounds * _MEMORY + num_others + len(looked_up)
        self._looked_up = self._looked_up * _MEMORY + len(looked_up)
        self._nodes = self._nodes * _MEMORY + sum(nodes for nodes, _ in looked_up)
        self._tokens = self._tokens * _MEMORY + sum(accept_len for _, accept_len in looked_up)
        self._steps = self._steps * _MEMORY + 1
        self._with_any = self._with_any * _MEMORY + (len(looked_up) > 0)

    @property
    def any_share(self) -> float:
        """Of steps, those in which some round was looked up."""
        return self._with_any / self._steps

    @property
    def share(self) -> float:
        """How many of all rounds."""
        return self._looked_up / self._rounds

    @property
    def tokens(self) -> float:
        """Accept length of each."""
        return self._tokens / self._looked_up if self._looked_up else 1.0

    @property
    def nodes(self) -> float:
        """Nodes of each."""
        return self._nodes / self._looked_up if self._looked_up else 1.0


class _Worth:
    """What a round is worth in one step, by who drafts it and how many: its tokens, less those its time would bring."""

    def __init__(self, policy: DraftLengthPolicy, num_rounds: int, width: int) -> None:
        self._width, self._menu = width, [each for each in policy.menu_of(num_rounds) if each > 1]
        if num_rounds == 1:  # if it is looked up, no head runs
            own, *costs = policy.costs_of(num_rounds, [width, *map(_all_looked_up, self._menu)])
            rate = policy.tokens_of(width) / own  # tokens that go with the cost of a step
            self._prices, self._head_price = [rate * cost for cost in costs], rate * own
        else:
            node, draft, wider = policy.prices(num_rounds, width)
            self._prices = [wider + node * (each - 1) for each in self._menu]
            self._head_price = (node + draft) * (width - 1)
        # by shares: of what was looked up the best worth and width, of the head its worth
        self._lookups: dict[tuple[int, int], tuple[float, int]] = {}
        self._heads: dict[tuple[int, int], float] = {}

    def width(self, share: Share, head_share: Share) -> int:
        """Nodes of what was looked up, if that is worth more than what the head drafts; else 0."""
        key, head_key = _rounded(share), _rounded(head_share)
        if key not in self._lookups:
            self._lookups[key] = self._best(_of(key))
        if head_key not in self._heads:
            self._heads[head_key] = tokens_of(_of(head_key), self._width) - self._head_price
        worth, width = self._lookups[key]
        return width if worth > self._heads[head_key] else 0

    def _best(self, share: Share) -> tuple[float, int]:
        pairs = zip(self._menu, self._prices, strict=True)
        return max(((tokens_of(share, each) * (1 - _EDGE) - price, each) for each, price in pairs), default=(-inf, 0))


def _rounded(share: Share) -> tuple[int, int]:
    return round(share[0] * _STEP), round(share[1] * _STEP)


def _of(key: tuple[int, int]) -> Share:
    return key[0] / _STEP, key[1] / _STEP


def _work(num_others: float, width: int, more_nodes: float, are_more: float) -> Work:
    """Of so many rounds of a width that the head drafts for, and the nodes beyond one of those that were looked up.

    `are_more`: how likely there are such nodes.
    """
    drafts = num_others * (width - 1)
    wider = 1.0 if drafts else are_more
    return Work(nodes=drafts + more_nodes, drafts=drafts, passes=(width - 1) * (num_others > 0), wider=wider)


def _all_looked_up(width: int) -> int:
    """Whose cost it is: rounds of that width whose drafts are all looked up."""
    return -width if width > 1 else 1
