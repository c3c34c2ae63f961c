"""More prompts than the queue holds: all are answered, in order, and nobody else is shut out by them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from roost import LLM, EngineConfig, MemoryConfig, ModelConfig, Options, SchedConfig
from roost.errors import CapacityError, RequestError
from roost.library.batch import RequestBatch
from roost.library.engine_thread import EngineThread, Events
from roost.library.llm import BatchError
from roost.messages import Command, Refused, Reply, Submit
from roost.step import StepPlan
from tests.support.chain_model import save_chain, token
from tests.unit.library.test_llm import WAIT_S, idle, in_thread

SPELT = ("a", "b", "hell", "o", "!", "1", "2")
FOLLOWS = dict(pairwise(SPELT))
ONE = Options(temperature=0, max_new_tokens=1)
ENDLESS = Options(temperature=0, ignore_eos=True)
CONFIG = EngineConfig(
    model=ModelConfig(weights="fp32", threads=1),
    memory=MemoryConfig(page_size=4, pool_tokens=16384),
    sched=SchedConfig(max_running=2, max_queued=4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chain(tmp_path_factory.mktemp("chain"), *SPELT)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    """A queue of four."""
    with LLM(str(folder), CONFIG) as llm:
        yield llm
        assert idle(llm).pools[0].leased == 0


def test_prompts_past_the_queue_limit_are_all_answered_in_their_order(llm: LLM) -> None:
    prompts = [piece for _ in range(20) for piece in FOLLOWS]
    assert [output.text for output in llm.generate_all(prompts, ONE)] == [FOLLOWS[each] for each in prompts]


def test_1300_prompts_fit_a_queue_of_1024(folder: Path) -> None:
    config = replace(CONFIG, sched=SchedConfig(max_running=64, max_queued=1024, chunk=2048))
    prompts = [list(FOLLOWS)[number % 6] for number in range(1300)]
    with LLM(str(folder), config) as llm:
        assert [output.text for output in llm.generate_all(prompts, ONE)] == [FOLLOWS[each] for each in prompts]


def test_more_outputs_of_a_prompt_than_the_queue_holds_come_too(llm: LLM) -> None:
    outputs = llm.generate_all(["a", "o"], replace(ONE, n=9, max_new_tokens=2))
    assert [[choice.text for choice in output.choices] for output in outputs] == [["bhell"] * 9, ["!1"] * 9]


def test_others_that_fill_the_queue_are_waited_for(llm: LLM) -> None:
    others = [submit for _ in range(6) for submit in llm._submits((token("a"),), ENDLESS)]
    events = Events()
    for submit in others[:2]:
        llm._engine.send(submit, events.put)
    while llm.stats().running < 2:
        pass
    for submit in others[2:]:
        llm._engine.send(submit, events.put)
    asked, found = in_thread(lambda: [output.text for output in llm.generate_all(["a", "hell", "1"], ONE)])
    with pytest.raises(CapacityError, match="--max-queued 4"):
        next(llm.stream("a", ONE))
    assert not found
    for submit in others:
        llm._engine.abort(submit.request_id)
    asked.join(WAIT_S)
    assert found == [["b", "o", "2"]]


def test_a_long_list_leaves_room_in_the_queue_for_others(llm: LLM) -> None:
    asked, found = in_thread(lambda: len(llm.generate_all(["a"] * 16, replace(ENDLESS, max_new_tokens=30))))
    while llm.stats().queued < 2:
        pass
    most = 0
    while not found:
        assert next(llm.stream("hell", ONE)).text == "o", "never a 429"
        most = max(most, llm.stats().queued)
    asked.join(WAIT_S)
    assert found == [16] and most <= 3


class Gone:
    """An engine of which nothing is heard but that it has ended."""

    def __init__(self) -> None:
        self.sent: list[Command] = []

    def send(self, command: Command, deliver: Reply) -> None:
        """Note what is sent."""
        self.sent.append(command)
        deliver(Refused(request_id="", status=503, message="the engine has ended"))

    def abort(self, request_id: str) -> None:
        """Nothing runs."""


@pytest.mark.parametrize(("max_queued", "share"), [(1, 1), (2, 1), (3, 1), (4, 2), (1024, 512)])
def test_half_of_the_queue_is_left_to_others_while_nothing_has_started(max_queued: int, share: int) -> None:
    engine, asked = Gone(), [Submit(request_id=str(number), tokens=(1,)) for number in range(2000)]
    with pytest.raises(CapacityError, match="the engine has ended"):
        next(RequestBatch(cast(EngineThread, engine), asked, max_queued).events())
    assert engine.sent == asked[:share]


def test_several_lists_at_once_are_all_answered(llm: LLM) -> None:
    lists = [["a", "b"] * 12, ["hell", "o"] * 12, ["!", "1"] * 12, ["a"] * 24]
    asked = [
        in_thread(lambda prompts=prompts: [each.text for each in llm.generate_all(prompts, ONE)]) for prompts in lists
    ]
    for thread, _ in asked:
        thread.join(WAIT_S)
    assert [found for _, found in asked] == [[[FOLLOWS[each] for each in prompts]] for prompts in lists]


def test_what_can_never_be_served_is_refused_before_anything_starts(llm: LLM) -> None:
    before = idle(llm)
    for bad, status, param in (((9999,), 400, "tokens"), ("x" * 5000, 413, "tokens"), (3, 400, "prompt")):
        with pytest.raises(RequestError, match=r"\(prompt 90 of 91\)") as refused:
            llm.generate_all([*["a"] * 90, bad], ENDLESS)  # type: ignore[list-item]
        assert (refused.value.status, refused.value.param) == (status, param)
    assert idle(llm).endings == before.endings and llm.stats().steps == before.steps
    for bad in ("abc", b"abc", 7, None, {"a": 1}):  # type: ignore[assignment]
        with pytest.raises(RequestError, match="prompts: must be a list"):
            llm.generate_all(bad, ONE)  # type: ignore[arg-type]


def test_a_prompt_that_fails_on_the_way_costs_the_others_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run = llm._running.executor.runner.run

    def break_on_x(plan: StepPlan) -> Callable[[], object]:
        if token("x") in plan.tokens:
            raise ValueError("a kernel that dislikes x")
        return run(plan)

    monkeypatch.setattr(llm._running.executor.runner, "run", break_on_x)
    prompts = [*FOLLOWS, "x", *FOLLOWS, "xx"]
    with pytest.raises(BatchError, match="2 of 14 prompts failed, the first of them prompt 6: ") as failed:
        llm.generate_all(prompts, ONE)
    texts = [None if output is None else output.text for output in failed.value.outputs]
    assert texts == [FOLLOWS.get(prompt) for prompt in prompts]
    assert set(failed.value.errors) == {6, 13}
    assert all(isinstance(error, CapacityError) and error.status == 500 for error in failed.value.errors.values())
    with pytest.raises(CapacityError, match="a step failed"):
        llm.generate("x", ONE)
    assert llm.generate("a", ONE).text == "b"


def test_an_engine_that_ends_hands_over_what_was_done(folder: Path) -> None:
    llm = LLM(str(folder), CONFIG)
    told: list[int] = []

    def told_once(num_done: int) -> None:
        told.append(num_done)
        if num_done == 3:
            llm.close()

    with pytest.raises(BatchError) as failed:
        llm._complete(["a"] * 30, ONE, told_once)
    done = [output.text for output in failed.value.outputs if output is not None and output.text]
    assert len(done) >= 3 and set(done) == {"b"} and len(failed.value.errors) >= 20
    with pytest.raises(CapacityError, match="the engine has ended"):
        llm.generate_all(["a", "b"], ONE)


def test_leaving_a_list_early_ends_what_runs_and_sends_nothing_more(llm: LLM) -> None:
    ended = sum(count for _, count in idle(llm).endings)
    submits = [submit for _ in range(30) for submit in llm._submits((token("a"),), ENDLESS)]
    events = RequestBatch(llm._engine, submits, 4).events()
    next(events)
    events.close()
    assert sum(count for _, count in idle(llm).endings) - ended <= 4


def test_progress_is_told_only_if_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[str, int, bool, list[int]]] = []

    @contextmanager
    def bar(label: str, total: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
        bars.append((label, total, is_shown, []))
        yield bars[-1][-1].append

    monkeypatch.setattr("roost.library.llm.counting_bar", bar)
    llm.generate_all(["a"] * 7, replace(ONE, n=2), show_progress=True)
    llm.generate_all(["a"], ONE)
    assert [each[:3] for each in bars] == [("prompts", 7, True), ("prompts", 1, False)]
    told = bars[0][-1]
    assert told == sorted(told) and set(told) == set(range(8)) and told.count(7) == 1
