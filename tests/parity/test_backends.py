"""An attention backend is one file and one entry: a made-up one, which plans on the host, serves with right tokens.

The file is this one, the entry `PLANNED`. What it does not declare is refused; its hook is called before each replay.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, PageTable
from roost.attention.protocol import ReadKv
from roost.attention.registry import BACKENDS, TORCH, Backend
from roost.config.options import EngineConfig, ModelConfig
from roost.config.resolve import resolve
from roost.device.device import Device
from roost.errors import ConfigError
from roost.layers.rotary import CosSin, rotate
from roost.layers.segments import Segments
from roost.models.model import KvShape
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.startup import backend_of, ops_of
from tests.support.graph_rehearsal import read_segments, rehearsed
from tests.support.spec_matrix import model_of
from tests.support.tiny_models import CPU, Served, configure, greedy, prompts

PLANNED = Backend(
    name="planned",
    factory="tests.parity.test_backends:PlannedAttention",
    ops=TORCH.ops,
    devices=("cpu",),
    default_for=(),
    graphs=True,
    trees=False,
    windows=False,
    needs_host_lengths=True,
    tile_len_max=8,
)
WINDOWED = replace(PLANNED, name="windowed", windows=True)
REGISTERED = (*BACKENDS, PLANNED)
WINDOWS = ", ".join(each.name for each in BACKENDS if each.windows)
SINKS = ", ".join(each.name for each in BACKENDS if each.sinks)
TREES = ", ".join(each.name for each in BACKENDS if each.trees)
NGRAM = SpecShape(steps=3, topk=1, tokens=4, reads_history=True)
TREE = SpecShape(steps=3, topk=2, tokens=6, draft_kv=DraftKv.PAIR)
ROWS_MAX = 64


class PlannedAttention:
    """Attention whose start positions are put in place by the host, and are not read from the segments."""

    def __init__(self, device: Device) -> None:
        self._starts = torch.zeros(ROWS_MAX, dtype=torch.int64)  # by row
        self.num_reads = self.num_writes = 0
        self.replayed: list[tuple[str, int, int]] = []  # graph, rows and tokens of each step

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        """By what was planned."""
        assert segments.tile_len <= PLANNED.tile_len_max
        if segments.host is not None:  # else it is captured, and planned before each replay
            self._plan(segments.host.rows, segments.host.start_positions)
        self.num_reads += 1
        planned = replace(segments, start_positions=self._starts[segments.rows])
        return read_segments(table, planned, kv)

    def write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """As the reference does."""
        self.num_writes += 1
        query, key = rotate(qk, cos_sin).split((qk.shape[1] - value.shape[1], value.shape[1]), dim=1)
        cache.keys[layer, slots], cache.values[layer, slots] = key, value
        return query

    def copy(self, cache: KvCache, sources: Tensor, dests: Tensor) -> None:
        """Only trees move KV."""
        raise AssertionError("this backend declares no trees")

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Plan what the graph is about to read."""
        assert start_positions is not None
        self.replayed.append((graph, len(rows), int(query_lens.sum())))
        self._plan(rows, start_positions)

    def _plan(self, rows: np.ndarray, start_positions: np.ndarray) -> None:
        self._starts.numpy()[rows] = start_positions  # the host's doing: no tape sees it


@pytest.mark.parametrize("spec", [PLAIN, NGRAM], ids=["plain", "n-gram"])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_made_up_backend_serves_and_is_told_before_each_replay(
    spec: SpecShape, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = backend_of(EngineConfig(model=ModelConfig(backend="planned")), CPU, REGISTERED)
    assert chosen is PLANNED and ops_of(chosen) is ops_of(TORCH)
    rehearsed(monkeypatch, graphs=graphs, backend=chosen)
    served = Served(model_of("llama"), configure(chunk=20, max_running=4, spec=spec))
    attention = served.executor.runner.passes.attention
    assert isinstance(attention, PlannedAttention)
    num_captured, plans = len(attention.replayed), []
    launch = served.executor.launch
    monkeypatch.setattr(served.executor, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    asked = prompts(5, 33, 11, seed=8)
    for number, prompt in enumerate(asked):
        served.submit(f"r{number}", prompt, 14)
    served.run()
    served.executor.close()
    for number, prompt in enumerate(asked):
        assert served.output(f"r{number}") == greedy("llama", prompt, 14)
    assert attention.num_reads > 0 and attention.num_writes > 0
    expected: list[tuple[int, int]] = []  # rows and tokens: of the drafting, where there are chunks besides, and all
    for plan in plans if graphs else ():
        lens = plan.query_lens[~plan.is_prefill]
        if plan.is_prefill.any() and (lens > 1).any():
            expected.append((len(lens), int(lens.sum())))
        expected.append((len(plan.rows), int(plan.query_lens.sum())))
    assert [tuple(step) for _, *step in attention.replayed[num_captured:]] == expected
    assert len({graph for graph, *_ in attention.replayed[:num_captured]}) == num_captured  # each has a name of its own
    assert (num_captured > 0) == graphs


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        (
            "mistral",
            PLAIN,
            f"--backend planned does not read sliding windows, and the model has layers with one; these do: {WINDOWS}",
        ),
        (
            "gpt-oss",
            PLAIN,
            f"--backend windowed does not read attention sinks, and the model's heads have them; these do: {SINKS}",
        ),
        (
            "llama",
            TREE,
            f"--spec-topk 2 needs an attention backend that reads trees: planned does not, these do: {TREES}; "
            "or use --spec-topk 1",
        ),
    ],
)
def test_what_a_backend_does_not_declare_is_refused(kind: str, spec: SpecShape, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(configure(spec=spec), model_of(kind).traits, WINDOWED if kind == "gpt-oss" else PLANNED)
    assert str(refused.value) == message
