"""Rounds that are captured and replayed, led by lengths that only the device knows, give what plain steps give."""

import pytest

from tests.parity.matrix import DRAFTERS, Cell, Matrix, head_of, model_of, work
from tests.parity.rehearsal import rehearsed
from tests.parity.tiny import greedy

PLACES = [("llama", 4), ("mistral", 1), ("gemma3-untied", 16)]


@pytest.mark.parametrize("graphs", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("kind", "page_size"), PLACES)
@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_output_is_that_of_the_reference(
    drafter: str, kind: str, page_size: int, depth: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, _ = DRAFTERS[drafter]
    model_of(kind), head and head_of(head, kind)  # made as ever, before engines run otherwise
    rehearsed(monkeypatch, graphs=graphs)
    cell = Cell(drafter=drafter, depth=depth, page_size=page_size, kind=kind, load="mixed")
    served = Matrix(cell)
    requests = work()
    served.serve(requests)
    for number, (prompt, num_new) in enumerate(requests):
        assert served.output(f"r{number}") == greedy(kind, prompt, num_new), number
