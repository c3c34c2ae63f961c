"""Prompts by kind of text, for benchmarks of speculation: one file of `bench/prompts` for each.

The texts were written for this project, the records of `retrieval` made from lists of words; none is from a public
data set. An answer repeats much of its prompt in some kinds (retrieval, rewriting) and nothing in others (chat, math),
and drafts are worth accordingly. Used by `drafts` and `spec_load`; it never measures anything.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from roost.cli.prompts import read_turns
from roost.errors import ConfigError

FOLDER = Path(__file__).parent / "prompts"
KINDS = ("summaries", "translation", "retrieval", "rewriting", "code", "math", "chat", "json")
ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--prompts and --kinds: what is answered."""
    shape = "a JSON object with `turns` or `prompt` a line"
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help=f"files, {shape}")
    parser.add_argument("--kinds", nargs="+", choices=[ALL, *KINDS], default=[], help="the project's own, beside files")


def texts(prompts: Sequence[Path], kinds: Sequence[str]) -> dict[str, list[list[str]]]:
    """Conversations of kinds, in their order, and then of files, by name."""
    own = [FOLDER / f"{kind}.jsonl" for kind in KINDS if kind in kinds or ALL in kinds]
    found: dict[str, list[list[str]]] = {}
    for path in (*own, *prompts):
        if path.stem in found:
            raise ConfigError(f"--prompts: {path} would have the name of another text, {path.stem}")
        found[path.stem] = read_turns(path)
    return found
