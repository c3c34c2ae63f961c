"""Progress: who can go on does, and nothing that a prompt could use is left idle.

Every decode row that has pages is in every step (without `--mixed`, at least in every second one); the prompts of a
step use its whole budget; each of them gets the part that docs/ARCHITECTURE.md promises; a limit on the size of steps
does not outlast its cause. Reads the engine's state; never changes it. `waiting.py` looks at the queue.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from roost.sched.request import Mark, Request
from roost.sched.state import State
from roost.sched.step_budget import prompt_budget as learned_budget
from roost.sched.step_limits import SizeLimit
from roost.step import StepPlan
from tests.sim.checker import Broken

PREFILL_PART = 1 / 4  # of the time of a mixed step, at least
LIMIT_PARTS = 4  # where steps are limited in tokens, prompts have at least 1/4 of them
CHUNK_FIRST = 512  # prompt tokens of a step before anything was measured
PATIENCE = 64  # good steps until a larger one is tried


def prompt_budget(state: State, num_rounds: int, round_width: int, *, delays: bool = False) -> tuple[int, int]:
    """The rule in force: fewest and most prompt tokens of a step beside so many rounds, while prompts have more.

    It is the budget that was learned (`sched/step_budget.py`), which leaves prompts at least a quarter of a mixed
    step's time, and is `--chunk` at most. Where the draft length is chosen by cost, it is halved at times, to learn
    what chunks cost. Where steps are limited in tokens, prompts have what rounds leave of them, or a quarter.
    """
    times, limit, chunk = state.step_times, state.step_limits.tokens.most, state.resolved.chunk
    budget = learned_budget(state, num_rounds, round_width, chunk, delays=delays)
    rounds = times.of_rounds_beside(num_rounds, round_width) if num_rounds else None
    quarter = None if rounds is None else times.num_tokens_within(num_rounds, round_width, rounds / (1 - PREFILL_PART))
    if not min(chunk, CHUNK_FIRST, max(1, int(quarter or 1))) <= budget <= chunk:
        raise Broken(f"budget: {budget} prompt tokens beside {num_rounds} rounds, {quarter} take a quarter of a step")
    if limit is not None:
        budget = max(1, min(budget, max(limit - num_rounds * round_width, limit // LIMIT_PARTS)))
    is_halved = num_rounds > 0 and state.resolved.widths.is_auto
    return max(1, budget // 2) if is_halved else budget, budget


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that waits for prefill when a step is planned."""

    request: Request
    has: int  # tokens of it in the step
    wants: int  # tokens of it that were left
    is_out: bool  # it had no pages, or no place

    @property
    def lacks(self) -> int:
        """Tokens of it that are left after the step."""
        return self.wants - self.has


class Progress:
    """Watches the steps of one engine."""

    def __init__(self, state: State) -> None:
        self._state, self._resolved = state, state.resolved
        self._had_chunks = False  # whether the last step had prefill
        self._has_launched = False  # whether this tick has a step
        self._without_pages: set[str] = set()  # who sits it out
        self._raised: dict[int, tuple[int | None, int]] = {}  # by measure: its limit, and the good steps until then
        self._num_broken = 0

    # --- rows --------------------------------------------------------------------------------------------------

    def sits_out(self, request_id: str) -> None:
        """A request has no pages for the next step."""
        self._without_pages.add(request_id)

    def launched(self, plan: StepPlan, requests: list[Request]) -> None:
        """A step is launched: whoever could have been in it is, and its prompts have what they were promised."""
        had_chunks, self._had_chunks = self._had_chunks, bool(plan.is_prefill.any())
        self._has_launched = True
        is_alone = requests[0].num_failures > 0  # a suspect runs alone: for this step there is nobody else
        ready = requests if is_alone else [each for each in self._state.running if not each.num_failures]
        in_step = {each.id: number for number, each in enumerate(requests)}
        absent = [each for each in ready if each.id not in in_step and self._wants_round(each)]
        num_rounds = len(absent) + int((~plan.is_prefill).sum())
        prompts = list(self._prompts(ready, plan, in_step))
        has_rounds = not plan.is_prefill.all()  # wider ones are those whose drafts are looked up
        widths = {plan.head_width} if has_rounds else set(self._resolved.widths.of(num_rounds))
        self._check_needed(plan, requests)
        if not self._is_full(plan, max(widths)):
            self._check_rounds(plan, [each for each in absent if not self._is_excused(each)], had_chunks)
        if self._resolved.sched.mixed or self._had_chunks:
            self._check_budget(plan, prompts, num_rounds, widths)
            self._check_shares(plan, prompts)
        elif not had_chunks and any(not each.is_out for each in prompts):
            raise Broken(f"starved: step {plan.step} and the one before have no chunk, prompts wait")

    def _wants_round(self, request: Request) -> bool:
        """Whether a request that is not in the step just planned could have had another round."""
        lease = request.lease
        return lease.device_len_max >= request.turn.prefill_len and self._has_use(request, lease.claimed_len)

    def _has_use(self, request: Request, claimed_len: int) -> bool:
        """Whether a request of which so much is certain to be written has use for a round.

        Its output may not be certain yet; or, where steps overlap, it is a session's: its last round writes the KV of
        its last token.
        """
        turn = request.turn
        is_certain = claimed_len >= turn.prompt_len + request.max_new_tokens - 1
        return not is_certain or (turn.session is not None and self._resolved.depth > 0 and request.max_new_tokens > 0)

    def _check_needed(self, plan: StepPlan, requests: list[Request]) -> None:
        """No round is run for a request whose output is certain without it; each is certain to write one token."""
        for request, is_chunk in zip(requests, plan.is_prefill.tolist(), strict=True):
            if not is_chunk and not self._has_use(request, request.lease.claimed_len - 1):
                raise Broken(f"needless: step {plan.step} has a round for {request.id}, which has all it wants")

    def _prompts(self, ready: list[Request], plan: StepPlan, in_step: dict[str, int]) -> Iterator[Prompt]:
        """Who was in prefill when the step was planned, in order."""
        for request in ready:
            number = in_step.get(request.id)
            if number is None:
                wants = request.turn.prefill_len - request.lease.device_len_max
                if wants > 0:
                    is_out = self._is_excused(request) or self._is_full(plan, 1)
                    yield Prompt(request, 0, wants, is_out)
            elif plan.is_prefill[number]:
                wants = request.turn.prefill_len - int(plan.start_positions[number])
                yield Prompt(request, int(plan.query_lens[number]), wants, is_out=False)

    def _is_excused(self, request: Request) -> bool:
        """Whether a request had no pages for this step, or lost them to an older one."""
        return request.mark is not Mark.NONE or request.id in self._without_pages

    def _is_full(self, plan: StepPlan, width: int) -> bool:
        """Whether the step limits leave no place for a row of this width."""
        rows, tokens = self._state.step_limits.rows.most, self._state.step_limits.tokens.most
        has_rows = rows is None or len(plan.rows) < rows
        return not (has_rows and (tokens is None or int(plan.query_lens.sum()) + width <= tokens))

    def _check_rounds(self, plan: StepPlan, absent: list[Request], had_chunks: bool) -> None:
        """No row stands still for prompts: a mixed step has every round, else no two steps in a row are without."""
        if absent and (self._resolved.sched.mixed or had_chunks or not self._had_chunks):
            raise Broken(f"starved: step {plan.step} has no round for {[each.id for each in absent]}")

    def after_tick(self) -> None:
        """If the tick launched nothing, nobody could have run; no limit outlasts its cause."""
        if not self._has_launched:
            ready = [each for each in self._state.running if not self._is_excused(each)]
            idle = [each.id for each in ready if each.in_prefill or self._wants_round(each)]
            if idle:
                raise Broken(f"idle: nothing is launched, {idle} could run")
        limits = self._state.step_limits
        for measure, limit in enumerate((limits.rows, limits.tokens)):
            self._check_limit(measure, limit)
        self._has_launched, self._without_pages = False, set()

    # --- prompts -----------------------------------------------------------------------------------------------

    def _check_budget(self, plan: StepPlan, prompts: list[Prompt], num_rounds: int, widths: set[int]) -> None:
        """A step's prompts have no more than its budget, and all of it while one of them lacks a token.

        What somebody without pages leaves over goes to those behind it; nobody may be behind it. Where no round is in
        the step, for want of pages, the width that was planned with is not known: one of `widths`.
        """
        limit, total = self._state.step_limits.tokens.most, len(plan.tokens)
        beside = num_rounds if self._resolved.sched.mixed else 0  # else rounds wait for this step to end
        least = prompt_budget(self._state, beside, max(widths), delays=num_rounds > beside)[0]
        most = prompt_budget(self._state, beside, min(widths), delays=num_rounds > beside)[1]
        if total > most:
            raise Broken(
                f"budget: step {plan.step} has {total} prompt tokens beside {num_rounds} rounds, {most} are due"
            )
        lacking = [number for number, each in enumerate(prompts) if each.lacks and not each.is_out]
        if not lacking or any(each.is_out for each in prompts[lacking[-1] :]):
            return
        if limit is not None:  # rounds may take what the device can
            least = min(least, limit - int(plan.query_lens[~plan.is_prefill].sum()))
        if total < least:
            names = [prompts[number].request.id for number in lacking]
            raise Broken(f"budget: step {plan.step} has {total} prompt tokens, {names} have more: {least} are due")

    def _check_shares(self, plan: StepPlan, prompts: list[Prompt]) -> None:
        """Each prompt of a step with b prompt tokens has its promised part, while all that wait have pages.

        A lower priority has what higher ones leave. Of the rest, each of c clients has b / c (of fewer tokens than
        clients, the first have one each); of a client's part p, its first prompt has p / 2, all of p if no shorter one
        waits; the shorter ones have p / 2, shortest first. Parts are rounded down, the first prompt's up.

        So a prompt of n tokens that is its client's first has its first token from the step that is launched by
        2 c n / b steps after it was admitted, and a shorter one by 2 c (n + s) / b, where s are the tokens of those
        shorter still; not counting the steps in which it or another prompt had no pages or no place, in which a suspect
        ran alone, in which prompts of a higher priority took all, and, without `--mixed`, the rounds in between.
        """
        if any(each.is_out for each in prompts) or self._is_full(plan, 1):
            return
        left = len(plan.tokens)
        for _, group in groupby(prompts, key=lambda each: each.request.submit.priority):
            by_client: dict[str, list[Prompt]] = {}
            for each in group:
                by_client.setdefault(each.request.submit.client, []).append(each)
            num_served = min(len(by_client), max(1, left))
            for own in list(by_client.values())[:num_served]:
                self._check_client(plan, own, left // num_served)
            left -= sum(each.has for own in by_client.values() for each in own)
            if left and any(each.lacks for own in by_client.values() for each in own):
                raise Broken(f"share: step {plan.step} has {left} tokens for a lower priority, a higher one lacks some")

    def _check_client(self, plan: StepPlan, own: list[Prompt], least: int) -> None:
        """A client's prompts have at least so many tokens together: its first half of them, then the shortest."""
        part, first = sum(each.has for each in own), own[0]
        name = first.request.id
        if part < min(least, sum(each.wants for each in own)):
            raise Broken(
                f"share: step {plan.step} has {part} tokens for {name} and its client's others, {least} are due"
            )
        shorter = sorted((each for each in own[1:] if each.wants < first.wants), key=lambda each: each.wants)
        half = -(-part // 2) if shorter else part
        if first.has < min(first.wants, half):
            raise Broken(f"share: step {plan.step} has {first.has} tokens for {name}, of {part} that its client has")
        ahead = first.has  # tokens of those that come before
        for each in shorter:
            due = min(each.wants, max(part - half + first.has, part) - ahead)
            if each.has < due:
                raise Broken(f"share: step {plan.step} has {each.has} tokens for {each.request.id}, {due} are due")
            ahead += each.has
        if any(each.lacks for each in (first, *shorter)) and part > ahead:
            raise Broken(f"share: step {plan.step} has tokens for prompts no shorter than {name}, before it is done")
        others = [each for each in own[1:] if each.wants >= first.wants]
        if others:
            self._check_client(plan, others, 0)

    # --- limits ------------------------------------------------------------------------------------------------

    def broke(self) -> None:
        """A step broke."""
        self._num_broken += 1

    def _check_limit(self, measure: int, limit: SizeLimit) -> None:
        """A limit below the size that broke is raised after 64 good steps; after twice as many, for each failure."""
        num_steps = self._state.totals.steps
        seen, since = self._raised.get(measure, (None, 0))
        if limit.most is None or limit.most >= limit.bad or limit.most != seen:
            self._raised[measure] = (limit.most, num_steps)
        elif num_steps - since > PATIENCE << self._num_broken:
            raise Broken(f"limit: steps have at most {seen} rows or tokens, {num_steps - since} of them went through")
