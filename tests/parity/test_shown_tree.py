"""A drafted tree that people see is one that a step verified: its accepted path is in what the request said."""

from itertools import pairwise

import pytest

from roost.messages import Event, Frame, GetFrame
from tests.support.spec_matrix import DRAFTERS, Cell, head_of, model_of
from tests.support.tiny_models import Served, greedy, prompts

KIND = "llama"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", ["ngram", "target-chain", "target-tree", "eagle3-tree"])
def test_the_accepted_path_is_what_was_said(drafter: str, depth: int) -> None:
    cell = Cell(drafter=drafter, depth=depth, page_size=4, kind=KIND, load="mixed")
    head, _ = DRAFTERS[drafter]
    served = Served(model_of(KIND), cell.config, head=head and head_of(head, KIND))
    (prompt,) = prompts(12, seed=4)
    trees = []

    def hear(event: Event) -> None:
        assert isinstance(event, Frame), event
        if event.told["tree"] is not None:
            trees.append(event.told["tree"])

    served.submit("seen", prompt * 2, 30)
    for _ in range(80):
        served.engine.post(GetFrame(), hear)
        served.engine.tick()
        if not served.engine.has_work:
            break
    served.run()
    said = prompt * 2 + greedy(KIND, prompt * 2, 60)  # rounds may go past the end
    assert served.output("seen") == said[24:54]
    assert trees and all(tree["id"] == "seen" for tree in trees)
    for tree in trees:
        parents, accepted = tree["parents"], tree["accepted"]
        assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
        assert accepted[0] == 0
        assert all(parents[node] == before for before, node in pairwise(accepted))
        path = tuple(tree["tokens"][node] for node in accepted)
        assert any(said[at : at + len(path)] == path for at in range(len(said)))
    if drafter.endswith("tree"):
        assert any(tree["parents"].count(0) > 1 for tree in trees)
    served.executor.close()
