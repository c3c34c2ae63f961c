"""What the matrices of speculation and sessions hold an engine to, two ranks of a model hold to as well.

Each rank has an engine of its own, whose steps are the same: all that is checked of one engine is checked of each.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from zlib import crc32

import pytest

from roost.layers.group import Group
from roost.models.decoder import Decoder
from tests.parity.test_spec_matrix import run
from tests.support import forced_drafts, session_clients, session_matrix, spec_matrix
from tests.support.session_scenes import SCENES, play
from tests.support.thread_group import ThreadRank, on_ranks
from tests.support.tiny_models import DEVICE, Tiny, ops, tiny

HERE = threading.local()  # the rank of this thread
ONE_IN = 8
SPLIT = ("llama", "mistral", "gemma3-untied", "gpt-oss", "qwen3-moe", "lfm2", "qwen3.5")


def is_drawn(name: str) -> bool:
    """Whether every change tries it."""
    return crc32(name.encode()) % ONE_IN == 0


def made_on_ranks(checkpoint: Callable[[str], Tiny]) -> Callable[[str], Decoder]:
    """Of each kind a rank's own model."""
    made: dict[tuple[Group, str], Decoder] = {}

    def model_of(kind: str) -> Decoder:
        key = HERE.group, kind
        if key not in made:
            tensors, own = checkpoint(kind).reference.state_dict(), replace(ops(), group=HERE.group)
            made[key] = Decoder(checkpoint(kind).config, tensors, "fp32", DEVICE, own)
        return made[key]

    return model_of


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Runs some work on two ranks, where models and heads are each rank's own."""
    monkeypatch.setattr(spec_matrix, "model_of", made_on_ranks(tiny))
    monkeypatch.setattr(spec_matrix, "head_of", spec_matrix.head_of.__wrapped__)
    model_of = made_on_ranks(forced_drafts.checkpoint)
    for module in (session_matrix, session_clients):
        monkeypatch.setattr(module, "model_of", model_of)
    monkeypatch.setattr(session_matrix, "_head", session_matrix._head.__wrapped__)

    def on_two(work: Callable[[], object]) -> None:
        def on_rank(group: Group) -> None:
            HERE.group = group
            work()
            assert isinstance(group, ThreadRank) and group.num_collectives > 0

        on_ranks(2, on_rank)

    return on_two


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[] if is_drawn(cell.name) else pytest.mark.full, id=cell.name)
        for cell in (*spec_matrix.drawn(num_together=2, joined=False), *spec_matrix.OTHERS, *spec_matrix.QUANTISED)
        if cell.kind in SPLIT
    ],
)
def test_speculation_is_invisible_on_two_ranks(
    cell: spec_matrix.Cell, ranks: Callable[[Callable[[], object]], None]
) -> None:
    ranks(lambda: run(cell))


@pytest.mark.parametrize(
    ("cell", "scene"),
    [
        pytest.param(cell, scene, marks=[] if is_drawn(cell.name + scene) else pytest.mark.full)
        for cell, scene in session_matrix.drawn(SCENES)
    ],
    ids=lambda value: value.name if isinstance(value, session_matrix.Cell) else value,
)
def test_sessions_are_exact_on_two_ranks(
    cell: session_matrix.Cell, scene: str, ranks: Callable[[Callable[[], object]], None]
) -> None:
    ranks(lambda: play(cell, scene))
