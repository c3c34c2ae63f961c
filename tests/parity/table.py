"""`python -m tests.parity.table`: run the tests of every option, and write what came of them to docs/OPTIONS.md.

A cell is the result of one test, by its parameters; nothing in the table is written by hand.
"""

import sys
from itertools import product
from pathlib import Path

import pytest

from tests.parity import parameters
from tests.support.option_cases import CASES, CIRCUMSTANCES, OPTIONS, REFUSED, Case
from tests.support.spec_engines import MODES, ON_OTHER_LAYERS

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "OPTIONS.md"
TEST = "tests/parity/test_spec_exact.py"
FUNCTION = "test_an_option_is_exact_or_refused"
COLUMNS = (*product(MODES, (0, 1)), *((mode, 1) for mode in ON_OTHER_LAYERS))
HEADER = (
    "# Options under speculation",
    "",
    f"Written by `make table`; do not edit. Each cell is the result of one test (`{FUNCTION}` of `{TEST}`):",
    "*exact*: the output equals, token for token, that of a dense reference that knows neither pages nor drafts, and",
    "so do its end and its log-probabilities; *refused*: a 4xx that names the field; *failed*: neither.",
)

Cells = dict[tuple[str, str, int], str]


class Results:
    """Collects the results of the option tests while pytest runs."""

    def __init__(self) -> None:
        self.cells: Cells = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo[None]) -> object:
        """Note what became of a cell."""
        report = yield
        if item.originalname == FUNCTION and (report.when == "call" or report.failed):
            params = item.callspec.params
            cell = (params["option"], params["mode"], params["depth"])
            good = "refused" if CASES[params["option"]].refused else "exact"
            self.cells[cell] = good if report.passed else "failed"
        return report


def written(cells: Cells) -> str:
    """docs/OPTIONS.md."""
    sections = {
        "Options of a request": OPTIONS,
        "What may happen to a request": CIRCUMSTANCES,
        "Not supported": REFUSED,
    }
    lines = [*HEADER]
    for title, cases in sections.items():
        lines += ["", f"## {title}", "", *_rows(cases, cells)]
    return "\n".join([*lines, "", *parameters.section()]) + "\n"


def _rows(cases: dict[str, Case], cells: Cells) -> list[str]:
    heads = ["option", *(f"{mode}, depth {depth}" for mode, depth in COLUMNS), "what was tried"]
    rows = [heads, ["---"] * len(heads)]
    for option, case in cases.items():
        rows.append([f"`{option}`", *(cells.get((option, *column), "failed") for column in COLUMNS), case.says])
    return [f"| {' | '.join(row)} |" for row in rows]


def main() -> int:
    """Run, write; the exit status says whether every cell is good."""
    results = Results()
    pytest.main([str(ROOT / TEST), "-k", FUNCTION, "-m", "", "-p", "no:cacheprovider"], plugins=[results])
    TABLE.write_text(written(results.cells))
    return 0 if results.cells and "failed" not in TABLE.read_text().partition("## ")[2] else 1


if __name__ == "__main__":
    sys.exit(main())
