"""Drafts of a length chosen step by step: whatever is chosen, the output is plain decoding's and no page is lost.

The chooser is made to take another width in every step, and other lookups in every round, by a seed, or left to itself.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from bench.heads import TargetHead
from roost.config.options import EngineConfig
from roost.draft_length.choice import DraftLengthPolicy
from roost.draft_length.lookups import Lookups, Repeat, RowDrafts
from roost.drafters.eagle import EagleDrafter
from roost.drafters.lookup import HostLookup, Lookup
from roost.layers.segments import Segments
from roost.models.model import Head
from roost.sched.request import Request
from roost.spec_shape import MATCH_MAX, SpecShape
from roost.step import StepPlan, StepResult, Ticket
from tests.support import option_requests as option_asks
from tests.support.forced_drafts import assert_every_page_is_back, close, drafted, model_of, null_prompts, plainly, turn
from tests.support.graph_rehearsal import Tape, rehearsed
from tests.support.random_heads import make_head
from tests.support.spec_configs import AUTO_CHAIN, AUTO_JOINT, AUTO_NGRAM
from tests.support.spec_engines import Setting, Speculating
from tests.support.stand_in_heads import HalfHead
from tests.support.tiny_models import VOCAB, Served, configure, greedy, prompts
from tests.support.workload import DEPTHS, Work

MENU = {1, 2, 3, 4, 5, 7}
WIDE = {9, 17}  # of rounds whose drafts are looked up
DRAFTERS: dict[str, tuple[str | None, SpecShape]] = {
    "ngram": (None, AUTO_NGRAM),
    "eagle": ("eagle", AUTO_CHAIN),
    "eagle3": ("eagle3", AUTO_CHAIN),
    "joint": ("half", AUTO_JOINT),
}
# each as on a host, where a round is narrowed to what was drafted for it; and those that look up as on a GPU
MODES = [(name, True) for name in DRAFTERS] + [("ngram", False), ("joint", False)]
IDS = [name + ("" if on_host else "-wide") for name, on_host in MODES]
Found = tuple[Tensor, Tensor]
FIND: dict[type[Lookup], Callable[[Lookup, Segments, Tensor | None], Found]] = {
    kind: kind.find for kind in (Lookup, HostLookup)
}
modes = pytest.mark.parametrize(("name", "on_host"), MODES, ids=IDS)


def _varied(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
    """Every step another width, every round other lookups, and wide ones for some, as if they repeated a text."""
    chances, note = random.Random(seed), Lookups.note

    def choose(self: DraftLengthPolicy, num_rounds: int, *, has_prefill: bool) -> int:
        return chances.choice(self._widths.of(num_rounds))

    def lookup_widths(
        self: DraftLengthPolicy, rows: Sequence[RowDrafts], width: int, widest: Sequence[int]
    ) -> list[list[int]]:
        found = []
        for own in widest:
            most = chances.choice([each for each in self.menu_of(len(rows)) if each <= own])
            some = [each for each in self.menu_of(len(rows)) if 1 < each <= most] if self._widths.narrows else [own]
            found.append([0, *(chances.choice([0, *some]) for _ in range(MATCH_MAX))])
        return found

    def widen(self: DraftLengthPolicy, num_rounds: int, width: int, repeats: Sequence[Repeat]) -> tuple[int, list[int]]:
        wide = self._widths.wide_of(num_rounds)
        return (chances.choice(wide), [*range(len(repeats))]) if wide else (width, [])

    def noted(
        self: Lookups, row: RowDrafts, match_len: int, drafts: Sequence[int], said: Sequence[int], num: int
    ) -> None:
        note(self, row, match_len, drafts, said, num)
        row.repeat_len = chances.choice((0, 9))

    monkeypatch.setattr(DraftLengthPolicy, "choose", choose)
    monkeypatch.setattr(DraftLengthPolicy, "lookup_widths", lookup_widths)
    monkeypatch.setattr(DraftLengthPolicy, "widen", widen)
    monkeypatch.setattr(Lookups, "note", noted)


def _often_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked up is wrong at the third place, or from there on."""
    for kind in (Lookup, HostLookup):

        def find(self: Lookup, rounds: Segments, forced: Tensor | None, kind: type[Lookup] = kind) -> Found:
            drafts, is_used = FIND[kind](self, rounds, forced)
            is_wrong = (torch.arange(drafts.shape[1]) == 2) & (rounds.start_positions % 3 > 0)[:, None]
            return torch.where(is_wrong, (drafts + 1) % VOCAB, drafts), is_used

        monkeypatch.setattr(kind, "find", find)


def _noted(served: Served) -> list[StepPlan]:
    """What the engine launches from now on."""
    plans: list[StepPlan] = []
    launch = served.executor.launch

    def launch_noted(plan: StepPlan) -> Ticket:
        plans.append(plan)
        return launch(plan)

    served.executor.launch = launch_noted  # type: ignore[method-assign]
    return plans


def _widths(plans: list[StepPlan]) -> set[int]:
    for plan in plans:
        widths = set(plan.query_lens[~plan.is_prefill].tolist())
        assert len(widths) <= 1 or plan.shape.lookup_steps  # one width a step, where nothing is looked up beside it
    return {int(width) for plan in plans for width in plan.query_lens[~plan.is_prefill]}


def _menu(name: str) -> set[int]:
    """Widths that a drafter's rounds have when they are chosen by chance."""
    return MENU | WIDE if DRAFTERS[name][1].lookup_steps else MENU


def _verified(results: list[StepResult]) -> set[int]:
    """Nodes that rounds verified, where drafts were looked up."""
    own = [result.lookups for result in results if result.lookups is not None]
    return {int(number) for lookups in own for number in lookups.num_nodes}


def _results(served: Served) -> list[StepResult]:
    """What the engine collects from now on."""
    results: list[StepResult] = []
    collect = served.executor.collect

    def collect_noted(ticket: Ticket) -> StepResult:
        results.append(collect(ticket))
        return results[-1]

    served.executor.collect = collect_noted  # type: ignore[method-assign]
    return results


def _head(name: str, kind: str) -> Head | None:
    head, _ = DRAFTERS[name]
    if head == "half":
        return HalfHead(model_of(kind))
    return head and make_head(head, model_of(kind))  # type: ignore[return-value]


def _work() -> Work:
    one, two, three = prompts(33, 5, 18, seed=3)
    return [(one, 30), (two * 4, 40), (three, 24), (one[:30] + two, 32)]


def _serve(served: Served, kind: str) -> None:
    for number, (prompt, num_new) in enumerate(_work()):
        served.submit(f"r{number}", prompt, num_new)
    served.run()
    for number, (prompt, num_new) in enumerate(_work()):
        assert served.output(f"r{number}") == greedy(kind, prompt, num_new), number


@DEPTHS
@pytest.mark.parametrize(("kind", "page_size"), [("llama", 1), ("llama", 16), ("qwen2-window", 16)])
@modes
def test_output_is_that_of_plain_decoding_whatever_is_chosen(
    kind: str, name: str, on_host: bool, page_size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _varied(monkeypatch)
    config = configure(spec=DRAFTERS[name][1], auto=True, depth=depth, page_size=page_size, chunk=20, pool_tokens=4096)
    served = Served(model_of(kind), config, head=_head(name, kind), on_host=on_host)
    plans, results = _noted(served), _results(served)
    _serve(served, kind)
    assert _widths(plans) == _menu(name) or (on_host and 17 in _widths(plans) < _menu(name))
    if DRAFTERS[name][1].lookup_steps:
        beside = [set(plan.query_lens[~plan.is_prefill].tolist()) for plan in plans]
        assert any(len(widths) > 1 for widths in beside), "rounds of several widths share a step"
        assert len(_verified(results) & _menu(name)) > 5 and served.engine.state.totals.failed_steps == 0
    assert_every_page_is_back(served)


@DEPTHS
@modes
def test_left_to_itself_it_is_exact_too(name: str, on_host: bool, depth: int) -> None:
    config = configure(spec=DRAFTERS[name][1], auto=True, depth=depth)
    served = Served(model_of("llama"), config, head=_head(name, "llama"), on_host=on_host)
    tick = served.engine.tick

    def timed() -> None:
        served.clock.advance(10**6)
        tick()

    served.engine.tick = timed  # type: ignore[method-assign]
    plans, results = _noted(served), _results(served)
    _serve(served, "llama")
    assert len(_widths(plans) | _verified(results)) > 1
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_drafter_that_is_always_right_is_so_at_every_width(
    page_size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is where a round of another width left it: every draft of every round is accepted."""
    _varied(monkeypatch, seed=1)
    served = drafted(configure(spec=AUTO_CHAIN, auto=True, depth=depth, page_size=page_size, pool_tokens=4096))
    plans = _noted(served)
    work = null_prompts(9, 10, 23, seed=3)
    for number, prompt in enumerate(work):
        served.submit(f"r{number}", prompt, 60)
    served.run()
    for number, prompt in enumerate(work):
        assert served.output(f"r{number}") == plainly("forgetful", prompt, 60), number
        spec = served.finish(f"r{number}").spec
        assert spec.drafts_accepted == spec.drafts_offered > 0, spec
    assert _widths(plans) == MENU
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("on_host", [True, False], ids=["narrowed", "wide"])
def test_a_head_beside_which_drafts_are_looked_up_loses_nothing(
    on_host: bool, page_size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is where rounds without it, or with wrong drafts of others, left it: all that it drafts is right."""
    _varied(monkeypatch, seed=7)
    _often_wrong(monkeypatch)
    config = configure(spec=AUTO_JOINT, auto=True, depth=depth, page_size=page_size, pool_tokens=4096)
    model = model_of("forgetful")
    served = Served(model, config, head=TargetHead(model), on_host=on_host)
    results, work = _results(served), null_prompts(9, 10, 23, seed=3)
    for number, prompt in enumerate(work):
        served.submit(f"r{number}", prompt, 60)
    served.run()
    for number, prompt in enumerate(work):
        assert served.output(f"r{number}") == plainly("forgetful", prompt, 60), number
        spec = served.finish(f"r{number}").spec
        assert spec.lookup_rounds > 0
        own = spec.drafts_offered - spec.lookup_offered, spec.drafts_accepted - spec.lookup_accepted
        assert own[0] > 0
        if on_host:  # else what lies behind its drafts may be right by chance
            assert own[0] == own[1], spec
    assert served.engine.state.spec_counters.lookup_offered > served.engine.state.spec_counters.lookup_accepted
    assert any(own.is_used.any() and not own.is_used.all() for each in results if (own := each.lookups) is not None)
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 16])
@modes
def test_turns_of_a_session_go_on_exactly(
    name: str, on_host: bool, page_size: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _varied(monkeypatch, seed=2)
    config = configure(spec=DRAFTERS[name][1], auto=True, depth=depth, page_size=page_size, pool_tokens=4096)
    served = Served(model_of("llama"), config, head=_head(name, "llama"), on_host=on_host)
    served.open("s")
    text: tuple[int, ...] = ()
    for number, prompt in enumerate(prompts(10, 3, 1, 7, 5, seed=5)):
        cached = turn(served, f"t{number}", prompt, 12)
        # a pair drafter's last slot stood for another successor: it runs again, and so does a shared page before it
        assert depth == 0 or len(text) - page_size - 1 <= cached <= len(text)
        text += prompt
        assert served.output(f"t{number}") == greedy("llama", text, 12), number
        text += served.output(f"t{number}")
    close(served)
    assert_every_page_is_back(served)


@modes
def test_preemptions_between_rounds_of_different_widths_lose_nothing(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _varied(monkeypatch, seed=3)
    config = configure(spec=DRAFTERS[name][1], auto=True, pool_tokens=4096)
    served = Served(model_of("llama"), config, head=_head(name, "llama"), on_host=on_host)
    for number, (prompt, num_new) in enumerate(_work()):
        served.submit(f"r{number}", prompt, num_new)
    served.run(preempt_ticks=4)
    assert served.count("suspend") > 4
    for number, (prompt, num_new) in enumerate(_work()):
        assert served.output(f"r{number}") == greedy("llama", prompt, num_new), number
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("mode", ["chain", "n-gram"])
def test_every_option_of_a_request_is_exact(mode: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _varied(monkeypatch, seed=5)
    setting = Setting(mode=mode, depth=depth)
    served, asks = Speculating(setting, auto=True), option_asks.asked(setting.kind)
    plans = _noted(served)
    served.serve(asks)
    served.check(asks)
    assert _widths(plans) >= {1, 2, 3, 5} | (WIDE if "joint" in mode else set())


@DEPTHS
@pytest.mark.parametrize("name", list(DRAFTERS))
def test_rounds_of_every_width_are_captured_and_exact(name: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    head = _head(name, "llama")
    model_of("llama"), greedy("llama", *_work()[0])  # made as ever, before engines run otherwise
    rehearsed(monkeypatch, graphs=True)
    _varied(monkeypatch, seed=4)
    replayed: list[Tape] = []
    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape: (replayed.append(tape), replay(tape))[1])
    config = configure(spec=DRAFTERS[name][1], auto=True, depth=depth, max_running=4, chunk=20)
    served = Served(model_of("llama"), config, head=head)
    graphs = served.executor.runner.round_graphs
    assert graphs is not None
    assert set(graphs.by_size) == {(size, width) for size in (1, 2, 4) for width in _menu(name)}
    plans = _noted(served)
    replayed.clear()
    _serve(served, "llama")
    assert _widths(plans) == _menu(name)
    # rounds of several widths, too, are verified by a graph that holds any
    are_mixed = [plan.is_prefill.any() or len(set(plan.query_lens.tolist())) > 1 for plan in plans]
    assert any(not plan.is_prefill.any() for plan, is_mixed in zip(plans, are_mixed, strict=True) if is_mixed) == (
        _menu(name) != MENU
    )
    mixed = [plan.query_lens[~plan.is_prefill] for plan, is_mixed in zip(plans, are_mixed, strict=True) if is_mixed]
    num_drafted = sum(bool((widths > 1).any()) for widths in mixed)
    assert len({int(width) for widths in mixed for width in widths}) > 1  # one graph holds rounds of any width
    assert (
        len(replayed) == 2 * len(plans) + num_drafted
    )  # two halves, and drafting beside chunks; nothing ran otherwise
    served.executor.close()


@pytest.mark.parametrize("width", sorted(MENU))
def test_a_round_runs_no_more_draft_passes_than_it_has_drafts(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftLengthPolicy, "choose", lambda self, num_rounds, has_prefill: width)
    passes: list[int] = []
    attend = EagleDrafter._attend

    def noted(self: EagleDrafter, *args: object) -> object:
        passes.append(1)
        return attend(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(EagleDrafter, "_attend", noted)
    served = Served(model_of("llama"), _alone(), head=_head("eagle", "llama"))
    plans = _noted(served)
    (prompt,) = prompts(9, seed=1)
    served.submit("r", prompt, 8)
    served.run()
    num_rounds = sum(not plan.is_prefill.any() for plan in plans)
    # every step extends; the first draft is from the extend before
    assert len(passes) == len(plans) + num_rounds * max(0, width - 2)


def test_a_claim_is_as_large_as_its_round_can_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    _varied(monkeypatch, seed=6)
    served = Served(model_of("llama"), _alone(), head=_head("eagle", "llama"))
    (prompt,) = prompts(9, seed=1)
    served.submit("r", prompt, 60)
    seen = set()
    while served.engine.has_work:
        served.engine.tick()
        requests: list[Request] = served.engine.state.running
        for claim in requests[0].lease.claims if requests and not requests[0].in_prefill else ():
            launched = next(each for each in served.engine.state.in_flight if each.plan.step == claim.step)
            if not launched.plan.is_prefill.any():
                assert (claim.size, claim.most) == (1, int(launched.plan.query_lens[0]))
                seen.add(claim.most)
    assert seen == MENU


def _alone() -> EngineConfig:
    return configure(spec=AUTO_CHAIN, auto=True, max_running=1)
