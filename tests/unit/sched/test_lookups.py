"""Lookup beside a head, as the scheduler sees it: what plans say of each row, and what is learned from results."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.draft_length.lookups import Lookups, RowDrafts
from roost.messages import Event, Finished, SpecStats, Submit
from roost.sched.engine import Engine
from roost.spec_shape import MATCH_MAX
from roost.step import LookupColumns, RowSetup, StepId, StepPlan, StepResult, Ticket

JOINT = SpecConfig(spec="eagle", draft="head")  # nobody reads the head here
SAYS, OTHER = 7, 8  # what every row says, and what it does not


@dataclass(frozen=True, slots=True)
class Text:
    """How a row goes on: tokens that a lookup finds again, and drafts that are right, the head's and looked-up ones."""

    match_len: int = 0
    head_right: int = 2
    lookup_right: int = 0


class Device:
    """Makes results up from what is said of each prompt's first token; a round is narrowed where that is possible."""

    def __init__(self, text_of: Callable[[int, int], Text], *, narrows: bool) -> None:
        self._text_of, self._narrows = text_of, narrows
        self._firsts: dict[int, int] = {}  # by row: its prompt's first token
        self._num_rounds: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._results: dict[StepId, StepResult] = {}
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Ticket:
        """Run it at once."""
        self.plans.append(plan)
        for setup in plan.setups:
            self._firsts[setup.row], self._num_rounds[setup.row] = int(setup.tokens[0]), 0
        rounds = [self._round(plan, i) for i in range(len(plan.rows))]
        accept_lens, nodes, matches, used, drafts = (np.array(column) for column in zip(*rounds, strict=True))
        has_drafts = plan.query_lens[~plan.is_prefill].max(initial=1) > 1
        lookups = LookupColumns(
            match_lens=matches.astype(np.int32),
            is_used=used.astype(np.bool_),
            num_nodes=nodes.astype(np.int32),
            drafts=drafts.astype(np.int32),
        )
        self._results[plan.step] = StepResult(
            step=plan.step,
            rows=plan.rows,
            epochs=plan.epochs,
            accept_lens=accept_lens.astype(np.int32),
            tokens=np.full((len(rounds), plan.shape.accept_max), SAYS, dtype=np.int32),
            lengths=np.array([self._length(plan, i, accept_lens[i]) for i in range(len(rounds))], dtype=np.int32),
            lookups=lookups if has_drafts else None,
        )
        return Ticket(step=plan.step)

    def collect(self, ticket: Ticket) -> StepResult:
        """Hand it over."""
        return self._results.pop(ticket.step)

    def _length(self, plan: StepPlan, i: int, accept_len: int) -> int:
        """How long a row is after the step."""
        row = int(plan.rows[i])
        chunk_end = int(plan.start_positions[i] + plan.query_lens[i])
        self._lengths[row] = chunk_end if plan.is_prefill[i] else self._lengths[row] + int(accept_len)
        return self._lengths[row]

    def _round(self, plan: StepPlan, i: int) -> tuple[int, int, int, bool, list[int]]:
        """Tokens added, nodes, match, whether it was used, and the drafts; of no meaning where none was looked up."""
        row, width, depth = int(plan.rows[i]), int(plan.query_lens[i]), plan.shape.depth_max
        if plan.is_prefill[i]:
            return int(plan.is_final[i]), width, MATCH_MAX, True, [OTHER] * depth
        if width == 1:
            return 1, 1, MATCH_MAX, True, [SAYS] * depth
        text = self._text_of(self._firsts[row], self._num_rounds[row])
        self._num_rounds[row] += 1
        assert plan.lookup_widths is not None
        wanted = int(plan.lookup_widths[i, text.match_len])
        nodes = min(width, wanted or plan.head_width) if self._narrows else width
        right = text.lookup_right if wanted else min(text.head_right, plan.shape.head_steps_of(nodes))
        drafts = [SAYS] * text.lookup_right + [OTHER] * depth
        return min(right + 1, nodes), nodes, text.match_len, wanted > 0, drafts[:depth]


class Served:
    """An engine over such a device."""

    def __init__(
        self,
        text_of: Callable[[int, int], Text],
        spec: SpecConfig = JOINT,
        *,
        on_host: bool = True,
        **sched: int | bool,
    ) -> None:
        base = SchedConfig(context=512, max_running=4, chunk=16)
        config = EngineConfig(
            memory=MemoryConfig(page_size=4, pool_tokens=8192, strict_memory=2),
            sched=replace(base, **sched),  # type: ignore[arg-type]
            spec=spec,
        )
        resolved = resolve(config, ModelTraits(vocab_size=50), on_host=on_host)
        self.device = Device(text_of, narrows=resolved.widths.narrows)
        self.clock, self.events = VirtualClock(), list[Event]()
        self.engine = Engine(resolved, self.device, self.clock)

    def submit(self, *firsts: int, num_new: int = 200, prompt_len: int = 5, client: str = "") -> None:
        """Ask for outputs of prompts that begin so."""
        for first in firsts:
            submit = Submit(request_id=f"r{first}", tokens=(first,) * prompt_len, max_new_tokens=num_new, client=client)
            self.engine.post(submit, self.events.append)

    def run(self, ticks: int = 2000) -> None:
        """Tick, a millisecond each, until everything has ended."""
        for _ in range(ticks):
            if not self.engine.has_work:
                return
            self.clock.advance(10**6)
            self.engine.tick()
        raise AssertionError("the engine does not come to rest")

    def spec(self, first: int) -> SpecStats:
        """What a request is told of its drafts."""
        (end,) = [each for each in self.events if isinstance(each, Finished) and each.request_id == f"r{first}"]
        assert end.usage.completion_tokens > 0 and end.reason == "length"
        return end.spec


REPEATS, WANDERS = 1, 2


def _text(first: int, number: int) -> Text:
    """A row that repeats a text after its first rounds, and one in which nothing comes again."""
    if first == REPEATS and number > 2:
        return Text(match_len=MATCH_MAX, lookup_right=16)
    return Text()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_row_that_repeats_a_text_has_wide_rounds_and_the_one_beside_it_what_the_head_drafts(
    on_host: bool, overlap: bool
) -> None:
    served = Served(_text, on_host=on_host, overlap=overlap)
    served.submit(REPEATS, WANDERS)
    served.run()
    widths = [plan.query_lens.tolist() for plan in served.device.plans if not plan.is_prefill.any()]
    if not on_host:  # what a round verifies is what was planned
        assert any(len(each) == 2 and each[0] == 17 and each[1] <= 7 for each in widths), widths
    repeats, wanders = served.spec(REPEATS), served.spec(WANDERS)
    assert repeats.lookup_rounds > 5 and repeats.lookup_accepted > 0.8 * repeats.lookup_offered > 50
    assert repeats.histogram[16] > 3 and repeats.rounds < wanders.rounds / 2
    assert (wanders.lookup_rounds, wanders.lookup_offered, wanders.lookup_accepted) == (0, 0, 0)
    assert sum(wanders.histogram[3:]) == 0


@pytest.mark.parametrize("on_host", [True, False])
def test_a_plan_says_of_each_row_what_is_looked_up_and_nothing_of_prompts(on_host: bool) -> None:
    served = Served(_text, on_host=on_host)
    served.submit(WANDERS)
    for _ in range(8):
        served.engine.tick()
    served.submit(REPEATS, prompt_len=60)
    served.run()
    mixed = 0
    for plan in served.device.plans:
        if plan.is_prefill.all():
            assert plan.lookup_widths is None
            continue
        if plan.lookup_widths is None:
            assert plan.query_lens[~plan.is_prefill].max() == 1
            continue
        assert plan.lookup_widths.shape == (len(plan.rows), MATCH_MAX + 1)
        assert not plan.lookup_widths[:, 0].any() and not plan.lookup_widths[plan.is_prefill].any()
        assert (plan.lookup_widths.max(axis=1) <= plan.query_lens)[~plan.is_prefill].all()
        assert (plan.head_width <= plan.query_lens)[~plan.is_prefill].all()
        mixed += plan.is_prefill.any()
    assert mixed > 1


def test_a_lookup_that_is_wrong_time_and_again_is_used_no_more() -> None:
    served = Served(lambda first, number: Text(match_len=MATCH_MAX, head_right=3, lookup_right=0))
    served.submit(1, num_new=400)
    served.run()
    spec = served.spec(1)
    assert 0 < spec.lookup_rounds < spec.rounds / 3, "the head is better here"
    assert spec.lookup_accepted == 0


def test_a_lookup_is_used_where_it_is_better_than_the_head_though_it_was_not_at_first() -> None:
    served = Served(lambda first, number: Text(match_len=1, head_right=0, lookup_right=4))
    served.submit(1, num_new=400)
    served.run()
    assert served.spec(1).lookup_rounds > served.spec(1).rounds / 2


def test_a_round_of_a_root_alone_teaches_nothing_of_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a round with drafts its columns are what an earlier round left."""
    noted: list[tuple[int, int]] = []
    note = Lookups.note

    def counted(self: Lookups, row: RowDrafts, match_len: int, drafts: list[int], said: list[int], num: int) -> None:
        noted.append((match_len, len(said)))
        note(self, row, match_len, drafts, said, num)

    def lookup_widths(self: object, rows: list[RowDrafts], width: int, widest: list[int]) -> list[list[int]]:
        return [[0] + [5 * (number % 2)] * MATCH_MAX for number, _ in enumerate(rows)]

    monkeypatch.setattr(Lookups, "note", counted)
    monkeypatch.setattr("roost.draft_length.choice.DraftLengthPolicy.lookup_widths", lookup_widths)
    monkeypatch.setattr("roost.draft_length.choice.DraftLengthPolicy.choose", lambda *args, **kwargs: 1)
    served = Served(lambda first, number: Text(match_len=3, lookup_right=4), overlap=False)
    served.submit(1, 2, num_new=40)
    served.run()
    widths = [plan.query_lens.tolist() for plan in served.device.plans if not plan.is_prefill.any()]
    assert [1, 5] in widths
    assert {match_len for match_len, _ in noted} == {3}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("on_host", [True, False])
def test_what_a_round_may_add_and_write_is_reserved_and_claimed(on_host: bool, overlap: bool) -> None:
    served = Served(_text, on_host=on_host, overlap=overlap)
    served.submit(REPEATS, WANDERS)
    seen: set[int] = set()
    while served.engine.has_work:
        served.clock.advance(10**6)
        served.engine.tick()
        for launched in served.engine.state.in_flight:
            plan = launched.plan
            rows = zip(launched.leases, launched.chunks, plan.query_lens.tolist(), strict=True)
            for lease, chunk, width in rows:
                claims = [claim for claim in lease.claims if claim.step == plan.step]
                assert chunk or all((claim.size, claim.most) == (1, width) for claim in claims)
                seen.update(width for _ in claims if not chunk)
            assert (plan.device_lens_max + plan.query_lens <= plan.ends[0]).all()
    if overlap:  # else nothing is in flight between ticks
        assert max(seen) == 17


@pytest.mark.parametrize(
    ("spec", "num_scopes"),
    [
        (JOINT, 2),
        (SpecConfig(spec="ngram"), 2),
        (replace(JOINT, spec_steps=3), 2),
        (replace(JOINT, spec_lookup="own"), 0),
    ],
    ids=["joint", "n-gram", "fixed", "own"],
)
def test_rows_share_what_they_say_with_those_of_their_client_alone(spec: SpecConfig, num_scopes: int) -> None:
    served = Served(_text, spec)
    served.submit(1, 2, num_new=4, client="a")
    served.submit(3, num_new=4, client="b")
    served.engine.tick()
    setups: list[RowSetup] = [setup for plan in served.device.plans for setup in plan.setups]
    scopes = {setup.scope for setup in setups}
    assert len(setups) == 3 and len(scopes) == max(1, num_scopes) and (scopes == {None}) == (num_scopes == 0)
    assert all(setup.tokens.tolist() == [int(setup.tokens[0])] * 5 for setup in setups)
    if num_scopes:
        assert setups[0].scope == setups[1].scope != setups[2].scope


def test_a_head_that_drafts_alone_is_sent_no_tokens_and_no_scope() -> None:
    served = Served(_text, replace(JOINT, spec_lookup="off"))
    launch = served.device.launch
    setups: list[RowSetup] = []

    def noted(plan: StepPlan) -> Ticket:
        setups.extend(plan.setups)
        return launch(replace(plan, setups=tuple(replace(each, tokens=np.array([9])) for each in plan.setups)))

    served.device.launch = noted  # type: ignore[method-assign]
    served.submit(9, num_new=1)
    served.run()
    assert [(setup.scope, len(setup.tokens)) for setup in setups] == [(None, 0)]
