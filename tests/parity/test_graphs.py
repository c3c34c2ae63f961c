"""Steps that are captured as graphs and replayed, with lengths on the device alone, give what plain steps give."""

from dataclasses import replace
from itertools import product
from zlib import crc32

import pytest
import torch
from torch import Tensor

from roost.forward.layout import StepLayout
from roost.graphs.mixed import GraphedMixed, MixedGraphs
from roost.layers.experts import Experts, Routed, weighted_sum
from roost.layers.ops import TORCH_OPS
from roost.messages import PromptLogprobs, Submit, TokenLogprob, Tokens
from roost.models.decoder import Decoder
from roost.runner.runner import Finish, Runner
from roost.sampling.params import SamplingParams
from roost.step import StepPlan, StepResult
from tests.support import option_requests as option_asks
from tests.support import spec_matrix
from tests.support.graph_rehearsal import Tape, rehearsed
from tests.support.spec_engines import MODES, Setting, Speculating
from tests.support.spec_matrix import DRAFTERS, Cell, Matrix, head_of, model_of, work
from tests.support.tiny_models import DEVICE, Served, configure, greedy, prompts, tiny

SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.9, top_p=0.95, seed=7),
    SamplingParams(temperature=0, repetition_penalty=1.4, presence_penalty=0.5),
)
PLACES = [("llama", 4), ("mistral", 1), ("gemma3-untied", 16)]
# the rest of what is looked up beside a head is eager rounds' and the matrix's
JOINED = {"target-joint": ("llama", 4), "eagle3-joint": ("mistral", 1), "target-joint-tree": ("gemma3-untied", 16)}
OTHERS = [
    (kind, drafter)
    for kinds, drafters in (
        (("lfm2-biased", "qwen3.5"), ("plain", "ngram", "eagle-chain", "eagle3-tree")),
        (("gemma4",), ("plain", "eagle3-tree")),
    )
    for kind, drafter in product(kinds, drafters)
]
CELLS = [
    (drafter, *place, depth, graphs)
    for drafter, place, depth, graphs in product(DRAFTERS, PLACES, (0, 1), (True, False))
    if "joint" not in drafter or (depth == 1 and graphs and JOINED.get(drafter, PLACES[0]) == place)
] + [(drafter, kind, 4, 1, graphs) for (kind, drafter), graphs in product(OTHERS, (True, False))]
ONE_IN = 3
DRAWN = [  # captured at depth 1, as engines run, are all; of the others a part
    pytest.param(
        *cell, marks=[] if cell[-2:] == (1, True) or crc32(repr(cell).encode()) % ONE_IN == 0 else pytest.mark.full
    )
    for cell in CELLS
]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[Tape]:
    """The tapes that were replayed, one entry for each time."""
    played: list[Tape] = []
    replay = Tape.replay

    def noted(tape: Tape) -> None:
        played.append(tape)
        replay(tape)

    monkeypatch.setattr(Tape, "replay", noted)
    return played


def serve(cell: Cell, replays: list[Tape], *, graphs: bool) -> Matrix:
    """An engine that has served a cell's work, the reference's output in every request."""
    served = Matrix(cell)
    replays.clear()
    requests = work()
    served.serve(requests)
    served.executor.close()
    for number, (prompt, num_new) in enumerate(requests):
        expected, name = cell.expected(prompt, num_new), f"r{number}"
        assert served.output(name) == expected[: len(served.output(name))], name
        assert len(served.output(name)) == num_new or served.finish(name).reason == "abort", name
    assert (len(replays) > 0) == graphs
    return served


def num_replays(plans: list[StepPlan]) -> int:
    """Two halves of every step; and before one of chunks and rounds, the drafting."""
    drafted = [plan for plan in plans if plan.is_prefill.any() and (plan.query_lens[~plan.is_prefill] > 1).any()]
    return 2 * len(plans) + len(drafted)


@pytest.mark.parametrize(("drafter", "kind", "page_size", "depth", "graphs"), DRAWN)
def test_output_is_that_of_the_reference(
    drafter: str,
    kind: str,
    page_size: int,
    depth: int,
    graphs: bool,
    replays: list[Tape],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, _ = DRAFTERS[drafter]
    model_of(kind), head and head_of(head, kind)  # made as ever, before engines run otherwise
    rehearsed(monkeypatch, graphs=graphs)
    serve(Cell(drafter=drafter, depth=depth, page_size=page_size, kind=kind, load="mixed"), replays, graphs=graphs)


def every_expert(normed: Tensor, routed: Routed, experts: Experts) -> Tensor:
    """What the experts of each token say, whoever they are: a tape cannot ask which of them are wanted."""
    pairs = zip(experts.gate_up, experts.down, strict=True)
    all_said = [down(TORCH_OPS.gate_up(gate_up(normed), experts.activation)) for gate_up, down in pairs]
    said, ids = torch.stack(all_said, dim=1), routed.ids[:, :, None].expand(-1, -1, normed.shape[1])
    return weighted_sum(said.gather(1, ids), routed.shares)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("drafter", ["plain", "ngram", "eagle-chain", "eagle3-tree"])
def test_sinks_and_experts_are_the_same_in_captured_steps(
    drafter: str, graphs: bool, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, (head, _) = tiny("gpt-oss"), DRAFTERS[drafter]
    ops = replace(TORCH_OPS, mix_experts=every_expert)
    model = Decoder(made.config, made.reference.state_dict(), "fp32", DEVICE, ops)
    assert head is None or head_of(head, "gpt-oss")  # made as ever, before engines run otherwise
    monkeypatch.setattr(spec_matrix, "model_of", lambda kind: model)
    rehearsed(monkeypatch, graphs=graphs)
    serve(Cell(drafter=drafter, depth=1, page_size=4, kind="gpt-oss", load="mixed"), replays, graphs=graphs)


@pytest.mark.parametrize("load", ["preemptions", "aborts"])
@pytest.mark.parametrize("drafter", ["plain", "ngram", "eagle-tree", "target-chain"])
def test_rows_that_come_and_go_leave_captured_rounds_as_they_were(
    drafter: str, load: str, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = DRAFTERS[drafter]
    model_of("llama"), head and head_of(head, "llama")
    rehearsed(monkeypatch, graphs=True)
    serve(Cell(drafter=drafter, depth=1, page_size=4, kind="llama", load=load), replays, graphs=True)


@pytest.mark.parametrize("drafter", ["plain", "target-tree"])
def test_quantised_kv_is_written_copied_and_read_in_captured_steps(
    drafter: str, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = DRAFTERS[drafter]
    model_of("llama"), head and head_of(head, "llama")
    cell = Cell(drafter=drafter, depth=1, page_size=4, kind="llama", load="mixed", kv_cache_dtype="int8")
    for prompt, num_new in work():
        cell.expected(prompt, num_new)  # by the backend that plans on the host
    rehearsed(monkeypatch, graphs=True)
    serve(cell, replays, graphs=True)


@pytest.mark.parametrize(
    ("mode", "depth"), [(mode, depth) for mode in MODES for depth in (0, 1) if depth or "joint" not in mode]
)
def test_every_option_of_a_request_is_exact_in_captured_rounds(
    mode: str, depth: int, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(mode=mode, depth=depth)
    rehearsed(monkeypatch, graphs=True)
    served = Speculating(setting)
    asks = option_asks.asked(setting.kind)
    served.serve(asks)
    served.check(asks, accepts=False)
    assert replays


def test_rounds_without_drafts_are_captured_where_a_limit_asks_for_them(
    replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of("llama"), head_of("target", "llama")
    rehearsed(monkeypatch, graphs=True)
    cell = Cell(drafter="target-chain", depth=1, page_size=4, kind="llama", load="side by side")
    limited = replace(cell.config, spec=replace(cell.config.spec, spec_max_batch=2))
    monkeypatch.setattr(Cell, "config", limited)
    served = serve(cell, replays, graphs=True)
    widths = {int(width) for plan in served.plans for width in plan.query_lens[~plan.is_prefill]}
    assert widths == {1, cell.shape.tokens}
    graphs = served.executor.runner.round_graphs
    assert graphs is not None and {width for _, width in graphs.by_size} == widths


@pytest.mark.parametrize("drafter", ["plain", "ngram", "eagle3-chain", "target-tree"])
def test_chunks_are_replayed_too_final_or_not_alone_and_beside_rounds(
    drafter: str, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = DRAFTERS[drafter]
    model_of("llama"), head and head_of(head, "llama")
    rehearsed(monkeypatch, graphs=True)
    loaded: list[StepPlan] = []
    load = MixedGraphs.load

    def noted(graphs: MixedGraphs, mixed: GraphedMixed, plan: StepPlan) -> StepLayout:
        loaded.append(plan)
        return load(graphs, mixed, plan)

    monkeypatch.setattr(MixedGraphs, "load", noted)
    served = serve(Cell(drafter=drafter, depth=1, page_size=4, kind="llama", load="mixed"), replays, graphs=True)
    planned = [plan for plan in served.plans if plan.is_prefill.any()]
    assert [plan.step for plan in loaded] == [plan.step for plan in planned]
    assert any(not plan.is_prefill.all() for plan in planned)
    finals = {bool(final) for plan in loaded for final in plan.is_final}
    assert finals == {True, False} and any(len(plan.rows) > 1 for plan in loaded)
    assert len(replays) == num_replays(served.plans)


def unfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have plans that do not depend on what is captured: steps are not filled to captured sizes."""
    monkeypatch.setattr("roost.sched.step_budget.fill_size", lambda sizes, num_tokens, least, most: most)


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        ("plain", "gemma3-untied"),
        ("plain", "gemma4"),
        ("ngram", "llama"),
        ("eagle3-chain", "llama"),
        ("target-tree", "gemma3-untied"),
        ("target-joint", "llama"),
        ("target-joint-tree", "llama"),
    ],
)
def test_every_step_that_is_replayed_tells_and_keeps_what_the_eager_one_does_bit_for_bit(
    drafter: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tokens drawn and penalties, log-probabilities of prompts and outputs, KV of every book and the drafter's."""
    head, _ = DRAFTERS[drafter]
    model_of(kind), head and head_of(head, kind)
    told, kept = [], []
    unfilled(monkeypatch)
    for graphs in (True, False):
        rehearsed(monkeypatch, graphs=graphs)
        served = Matrix(Cell(drafter=drafter, depth=1, page_size=4, kind=kind, load="mixed"))
        results = list[StepResult]()
        collect = served.executor.collect
        monkeypatch.setattr(
            served.executor, "collect", lambda ticket, to=results, of=collect: (to.append(of(ticket)), to[-1])[1]
        )
        for number, (prompt, num_new) in enumerate(work()):
            scored = 0 if number % 2 else None
            ask = Submit(request_id=f"r{number}", tokens=prompt, max_new_tokens=num_new, prompt_logprobs_from=scored)
            served.post(replace(ask, num_top_logprobs=2 if number > 2 else None, sampling=SAMPLINGS[number % 3]))
        served.run()
        served.executor.close()
        told.append([_bits(result) for result in results])
        kept.append([each[:, 4:].clone() for cache in served.kv_caches for each in (cache.keys, cache.values)])
    assert told[0] == told[1] and len(told[0]) > 20
    for mine, right in zip(*kept, strict=True):  # the null page is anybody's
        assert torch.equal(mine.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0))


def _bits(result: StepResult) -> list[object]:
    """Everything that a result says."""
    tokens = [own[:length].tolist() for own, length in zip(result.tokens, result.accept_lens, strict=True)]
    said: list[object] = [tokens, result.lengths.tolist()]
    for columns in (result.logprobs, result.prompt_logprobs):
        if columns is not None:
            said += [columns.offsets.tolist(), columns.logprobs.tobytes(), columns.top_logprobs.tobytes()]
            said.append(columns.top_ids.tolist())
    return said


@pytest.mark.parametrize("drafter", ["plain", "target-chain"])
def test_steps_with_chunks_that_no_size_holds_run_as_they_come(
    drafter: str, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = DRAFTERS[drafter]
    model_of("llama"), head and head_of(head, "llama")
    rehearsed(monkeypatch, graphs=True)
    monkeypatch.setattr("roost.config.resolve.mixed_sizes", lambda most: [7, 18])
    unfilled(monkeypatch)
    served = serve(Cell(drafter=drafter, depth=1, page_size=4, kind="llama", load="mixed"), replays, graphs=True)
    with_chunks = [plan for plan in served.plans if plan.is_prefill.any()]
    fits = [plan for plan in served.plans if not plan.is_prefill.any() or plan.query_lens.sum() <= 18]
    assert any(plan.query_lens.sum() > 18 for plan in with_chunks) and any(plan in with_chunks for plan in fits)
    assert len(replays) == num_replays(fits)


@pytest.mark.parametrize("depth", [0, 1])
def test_logprobs_beside_rounds_are_those_of_a_step_that_ran_whole(
    depth: int, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    first, second, third = prompts(6, 41, 9, seed=5)
    config = configure(depth=depth, chunk=20, pool_tokens=1024, page_size=4)
    plans: list[StepPlan] = []
    start = Runner.run

    def noted(runner: Runner, plan: StepPlan) -> Finish:
        plans.append(plan)
        return start(runner, plan)

    monkeypatch.setattr(Runner, "run", noted)
    found = []
    for graphs in (False, True):
        if graphs:
            rehearsed(monkeypatch, graphs=True)
        served = Served(model, config)
        replays.clear()
        plans.clear()
        served.post(Submit(request_id="first", tokens=first, max_new_tokens=30, num_top_logprobs=2))
        for _ in range(4):
            served.engine.tick()
        served.post(
            Submit(request_id="second", tokens=second, max_new_tokens=3, prompt_logprobs_from=0, num_top_logprobs=5)
        )
        served.submit("third", third, 12)
        served.run()
        served.executor.close()
        mixed = [plan for plan in plans if plan.is_prefill.any() and not plan.is_prefill.all()]
        assert any((plan.prompt_logprob_starts >= 0).any() for plan in mixed) and any(
            plan.is_final.any() for plan in mixed
        )
        assert len(replays) == 2 * len(plans) * graphs  # nothing ran operation by operation
        assert not _logprobs(served, "third")
        found.append({name: _logprobs(served, name) for name in ("first", "second")})
    for name, num_logprobs, top in (("first", 30, 2), ("second", 40 + 3, 5)):
        whole, parts = found[0][name], found[1][name]
        assert len(whole) == len(parts) == num_logprobs and {len(entry.top_logprobs) for entry in parts} == {top}
        assert [entry.logprob for entry in parts] == pytest.approx([entry.logprob for entry in whole], abs=1e-4)
        for mine, right in zip(parts, whole, strict=True):
            assert [token for token, _ in mine.top_logprobs] == [token for token, _ in right.top_logprobs]
            assert [value for _, value in mine.top_logprobs] == pytest.approx(
                [value for _, value in right.top_logprobs], abs=1e-4
            )


def _logprobs(served: Served, name: str) -> list[TokenLogprob]:
    """Of the prompt, if it was asked for, then of the output."""
    events = [
        event for event in served.events if isinstance(event, PromptLogprobs | Tokens) and event.request_id == name
    ]
    return [entry for event in events for entry in event.logprobs]


@pytest.mark.parametrize("drafter", ["plain", "target-chain", "target-tree"])
def test_padding_starts_anew_in_every_replay(
    drafter: str, replays: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds in a batch of four, more often than a row is long: the fourth, the padding row, gets no longer."""
    model, (head, _) = model_of("llama"), DRAFTERS[drafter]
    made = None if head is None else head_of(head, "llama")
    rehearsed(monkeypatch, graphs=True)
    shape = Cell(drafter=drafter, depth=1, page_size=4, kind="llama", load="mixed").shape
    served = Served(model, configure(context=24, max_running=4, spec=shape), made)
    asked = prompts(*[3] * 12, seed=6)
    for number, prompt in enumerate(asked):
        served.submit(f"r{number}", prompt, 20)
        if number % 3 == 2:
            served.run()
    served.executor.close()
    passes = served.executor.runner.passes
    assert len(replays) > 2 * passes.tables[0].row_width / shape.accept_max
    for number, prompt in enumerate(asked):
        assert served.output(f"r{number}") == greedy("llama", prompt, 20)
    assert int(passes.lengths.device[passes.padding_row]) == 0


def test_a_step_is_padded_to_the_smallest_captured_size_that_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    rehearsed(monkeypatch, graphs=True)
    served = Served(model, configure(chunk=40, max_running=5, context=64))
    served.executor.close()
    rounds, mixed = served.executor.runner.round_graphs, served.executor.runner.mixed_graphs
    assert rounds is not None and mixed is not None
    sizes = [found and found.sizes.rows for found in (rounds.find(number, 1) for number in range(1, 7))]
    assert sizes == [1, 2, 4, 4, 5, None] and rounds.find(1, 2) is None
    for num_tokens, size in {1: 16, 16: 16, 17: 32, 32: 32, 33: 45, 45: 45, 46: None}.items():
        found = mixed.find(num_tokens)
        assert (found and found.num_tokens) == size, num_tokens
