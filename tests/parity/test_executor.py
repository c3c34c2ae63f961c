"""The torch executor behind the seam: launch order, failures, and what it and the model refuse."""

from dataclasses import replace
from threading import Event

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.config.resolve import resolve
from roost.errors import InvariantError, StepFailure
from roost.layers.attention import Attend
from roost.models.decoder import Decoder
from roost.runner.executor import TorchExecutor
from roost.sampling.params import SamplingParams
from roost.spec_shape import PLAIN
from roost.step import SAMPLED, Ints, RowId, RowSetup, StepId, StepPlan, TableDelta
from tests.support.tiny_models import CPU, VOCAB, configure, greedy, prompts, tiny

PAGE_SIZE = 4
WAIT_S = 30


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def chunk_plan(step: int, tokens: tuple[int, ...], *, start: int = 0, final: bool = True) -> StepPlan:
    """A chunk on row 0, whose pages are 1, 2, 3… from the first position on."""
    end = start + len(tokens)
    return StepPlan(
        step=StepId(step),
        shape=PLAIN,
        rows=ints(0),
        epochs=ints(0),
        is_prefill=np.array([True]),
        query_lens=ints(len(tokens)),
        start_positions=ints(start),
        device_lens_max=ints(start),
        firsts=ints(0)[None],
        ends=ints(-(-end // PAGE_SIZE) * PAGE_SIZE)[None],
        is_final=np.array([final]),
        next_tokens=ints(SAMPLED if final else 0),
        tokens=ints(*tokens),
        token_offsets=ints(0, len(tokens)),
        num_top_logprobs=ints(-1),
        prompt_logprob_starts=ints(-1),
        prompt_logprob_ends=ints(-1),
        setups=(greedy_row(),) if start == 0 else (),
        deltas=(table_delta(start, end),),
    )


def greedy_row() -> RowSetup:
    return RowSetup(
        row=RowId(0), sampling=SamplingParams(temperature=0), prompt_len=1, min_len=1, stop_ids=(), tokens=ints()
    )


def round_plan(step: int, hi: int) -> StepPlan:
    """A decode round on row 0, at a length of `hi`."""
    return replace(
        chunk_plan(step, (0,), start=hi, final=False),
        is_prefill=np.array([False]),
        start_positions=ints(-1),
        tokens=ints(),
        token_offsets=ints(0, 0),
    )


def table_delta(start: int, end: int) -> TableDelta:
    first, last = -(-start // PAGE_SIZE), -(-end // PAGE_SIZE)
    pages = ints(*range(1 + first, 1 + last))
    return TableDelta(rows=ints(0), firsts=ints(first), offsets=ints(0, len(pages)), pages=pages)


def executor(model: Decoder) -> TorchExecutor:
    return TorchExecutor(model, resolve(configure(page_size=PAGE_SIZE), model.traits), CPU)


def broken_at(model: Decoder, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one forward of a model raise."""
    forward, calls = model.forward, []

    def forward_or_break(tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        calls.append(len(tokens))
        if len(calls) - 1 == call:
            raise RuntimeError("the device is gone")
        return forward(tokens, positions, attend)

    monkeypatch.setattr(model, "forward", forward_or_break)


def test_rounds_launched_before_the_prompt_is_collected_continue_it_on_the_device() -> None:
    (prompt,) = prompts(10)
    runs = executor(tiny("llama").model())
    plans = [chunk_plan(0, prompt[:7], final=False), chunk_plan(1, prompt[7:], start=7)]
    plans += [round_plan(step, 8 + step) for step in range(2, 9)]
    tickets = [runs.launch(plan) for plan in plans]
    results = [runs.collect(ticket) for ticket in tickets]
    assert [int(result.accept_lens[0]) for result in results] == [0] + [1] * 8
    assert [int(result.lengths[0]) for result in results] == [7, 10, 11, 12, 13, 14, 15, 16, 17]
    assert tuple(int(result.tokens[0, 0]) for result in results[1:]) == greedy("llama", prompt, 8)


def test_launch_returns_before_the_step_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(6)
    model = tiny("llama").model()
    forward, gate, passed = model.forward, Event(), []

    def wait_then_forward(tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        passed.append(gate.wait(WAIT_S))
        return forward(tokens, positions, attend)

    monkeypatch.setattr(model, "forward", wait_then_forward)
    runs = executor(model)
    ticket = runs.launch(chunk_plan(0, prompt))
    behind = runs.launch(round_plan(1, 6))
    gate.set()  # not reached if a launch waited for its step
    tokens = tuple(int(runs.collect(each).tokens[0, 0]) for each in (ticket, behind))
    assert passed == [True, True]
    assert tokens == greedy("llama", prompt, 2)


def test_steps_launched_behind_a_broken_one_break_until_it_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(6)
    model = tiny("llama").model()
    broken_at(model, 0, monkeypatch)
    runs = executor(model)
    first, second = runs.launch(chunk_plan(0, prompt)), runs.launch(round_plan(1, 6))
    with pytest.raises(StepFailure, match="step 0 broke: the device is gone"):
        runs.collect(first)
    third = runs.launch(round_plan(2, 7))  # its predecessor is broken, and still out
    for ticket in (second, third):
        with pytest.raises(StepFailure, match="behind one that broke"):
            runs.collect(ticket)
    again = runs.launch(chunk_plan(3, prompt))
    assert int(runs.collect(again).tokens[0, 0]) == greedy("llama", prompt, 1)[0]


def test_a_broken_step_leaves_lengths_and_tokens_of_its_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(6)
    model = tiny("llama").model()
    broken_at(model, 1, monkeypatch)
    runs = executor(model)
    runs.collect(runs.launch(chunk_plan(0, prompt)))
    with pytest.raises(StepFailure):
        runs.collect(runs.launch(round_plan(1, 6)))
    result = runs.collect(runs.launch(round_plan(2, 6)))
    assert int(result.lengths[0]) == 7
    assert int(result.tokens[0, 0]) == greedy("llama", prompt, 2)[1]


def test_equal_scores_give_the_lowest_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama").model()
    tied = torch.zeros(1, VOCAB)
    tied[0, [96, 41, 60]] = 2.5
    monkeypatch.setattr(model, "logits", lambda hidden: tied)
    runs = executor(model)
    assert int(runs.collect(runs.launch(chunk_plan(0, (5, 6, 7)))).tokens[0, 0]) == 41


def test_tables_follow_every_launched_plan_broken_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = prompts(8)
    model = tiny("llama").model()
    broken_at(model, 0, monkeypatch)
    runs = executor(model)
    tickets = [runs.launch(chunk_plan(0, prompt)), runs.launch(round_plan(1, 8))]
    for ticket in tickets:
        with pytest.raises(StepFailure):
            runs.collect(ticket)
    assert runs.runner.passes.tables[0].pages[0, :4].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("kind", "held", "said"),
    [
        ("llama", {"ends": ints(12)[None]}, r"reads from 0, writes \[12, 13\); the plan holds \[0, 12\)"),
        ("llama", {"device_lens_max": ints(11)}, r"writes \[12, 13\); .* a length of at most 11"),
        ("mistral", {"firsts": ints(8)[None]}, r"reads from 4, writes \[12, 13\); the plan holds \[8, 16\)"),
    ],
)
def test_a_step_past_what_its_plan_holds_is_named_as_a_bug(kind: str, held: dict[str, Ints], said: str) -> None:
    (prompt,) = prompts(12)
    runs = executor(tiny(kind).model())
    runs.collect(runs.launch(chunk_plan(0, prompt)))
    ticket = runs.launch(replace(round_plan(1, 12), **held))
    with pytest.raises(InvariantError, match=said):
        runs.collect(ticket)


def test_a_result_is_collected_once() -> None:
    runs = executor(tiny("llama").model())
    ticket = runs.launch(chunk_plan(0, (1, 2, 3)))
    runs.collect(ticket)
    with pytest.raises(InvariantError, match="step 0 is not out"):
        runs.collect(ticket)
