"""Fetch the default model and say where it is.

It is fetched once and checked; afterwards nothing is downloaded. Called by `main`.
"""

from argparse import ArgumentParser, Namespace

from roost.terminal import loading_bar
from roost.weights.pull import default_model

EXAMPLES = "  roost pull"


def add_flags(parser: ArgumentParser) -> None:
    """The command has none."""


def run(args: Namespace) -> int:
    """Fetch, if need be."""
    with loading_bar("fetching") as progress:
        path = default_model(progress)
    print(path)
    return 0
