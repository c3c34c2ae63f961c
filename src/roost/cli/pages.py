"""Who owns each KV page of a running server, as a table or as JSON.

Owns how the server's answer is shown: a line for each run of pages of one owner, and the sums of each pool below.
Called by `main`.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from roost.cli.http_client import HttpClient, explained
from roost.errors import RoostError
from roost.server.logs import printable

_PATH = "/v1/pages"
EXAMPLES = """\
  roost pages
  roost pages --url http://127.0.0.1:8124 --json"""


def add_flags(parser: ArgumentParser) -> None:
    """Flags of the command."""
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="the server's answer as it is")


def add_url(parser: ArgumentParser) -> None:
    """The flag that says which server is looked at."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="the running server, whose key is in $ROOST_API_KEY (default: http://127.0.0.1:8000)",
    )


def run(args: Namespace) -> int:
    """Ask, and print."""
    with explained(_PATH):
        answer = HttpClient(args.url).get(_PATH)
    if args.json:
        print(json.dumps(answer, indent=1))
        return 0
    try:
        table, sums = _table(answer), _sums(answer)
    except (KeyError, TypeError, ValueError) as error:
        raise RoostError(f"{_PATH} is not as this version reads it ({error!r}); --json prints it as it is") from error
    _print(table, sums)
    return 0


def _table(answer: dict[str, Any]) -> Table:
    table = Table()
    table.add_column("book")
    table.add_column("pages", justify="right")
    table.add_column("number", justify="right")
    table.add_column("kind")
    table.add_column("owner")
    for pool in answer["pools"]:
        for run in pool["pages"]:
            first, count = int(run["first"]), int(run["count"])
            last = first + count - 1
            pages = str(first) if count == 1 else f"{first}-{last}"
            cells = (pool["book"], pages, str(count), run["kind"], run.get("owner") or "")
            table.add_row(*(Text(printable(str(cell))) for cell in cells))  # Text: brackets in ids are no markup
    return table


def _sums(answer: dict[str, Any]) -> list[str]:
    lines = []
    for pool in answer["pools"]:
        unit = "states" if pool["book"] == "states" else f"pages of {int(answer['page_size'])} tokens"
        states = ", ".join(f"{int(pool[name])} {name}" for name in ("free", "leased", "cached", "retiring"))
        lines.append(f"{printable(str(pool['book']))}: {int(pool['total'])} {unit}: {states}")
    return lines


def _print(table: Table, sums: list[str]) -> None:
    """As wide as the terminal, or on a file as wide as the longest line."""
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, markup=False, width=sys.maxsize)
        console.width = max(console.measure(table).maximum, *map(len, sums), 1)
    console.print(table)
    for line in sums:
        console.print(line)
