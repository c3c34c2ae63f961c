"""The table of options is complete, and every cell is good: an option cannot be forgotten, nor be inexact."""

from dataclasses import fields

from roost.messages import Submit
from roost.sampling.params import SamplingParams
from tests.parity import parameters
from tests.tidy.source import ROOT

# names, the prompt, a group of options, and what a server says of a session for its own sake
NO_OPTIONS = {"request_id", "client", "tokens", "sampling", "known_len", "note"}
AS_USERS_SAY = {"num_top_logprobs": "logprobs"}
GOOD = {"exact", "refused"}
NUM_CELLS = 17  # six modes at two depths, and five on other layers


def rows() -> dict[str, list[str]]:
    """The cells of each option."""
    page, _, _ = (ROOT / "docs" / "OPTIONS.md").read_text().partition(parameters.TITLE)
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {option.strip("`"): results[:-1] for option, *results in cells}


def test_every_option_of_a_request_is_in_the_table() -> None:
    names = {each.name for each in (*fields(Submit), *fields(SamplingParams))} - NO_OPTIONS
    assert {AS_USERS_SAY.get(name, name) for name in names} - set(rows()) == set(), (
        "add a check to tests/support/option_cases.py and run `make table`"
    )


def test_every_cell_of_the_table_is_exact_or_refused() -> None:
    bad = {option: cells for option, cells in rows().items() if len(cells) != NUM_CELLS or not set(cells) <= GOOD}
    assert bad == {}


def test_the_page_says_of_every_sampling_parameter_what_its_definition_says() -> None:
    _, _, said = (ROOT / "docs" / "OPTIONS.md").read_text().partition(parameters.TITLE)
    assert [parameters.TITLE, *said.splitlines()[1:]] == parameters.section(), "run `make table`"
