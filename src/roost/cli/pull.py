"""Download the default model and print where it is.

It is downloaded once and verified; afterwards nothing is fetched. Called by `main`.
"""

from argparse import ArgumentParser, Namespace

from roost.terminal import download_bar
from roost.weights.pull import default_model

EXAMPLES = "  roost pull"


def add_flags(parser: ArgumentParser) -> None:
    """The command has none."""


def run(args: Namespace) -> int:
    """Download, if it is not there yet."""
    with download_bar("fetching") as progress:
        path = default_model(progress)
    print(path)
    return 0
