"""Prompts: read from a file, or the project's own for a quick measurement.

The latter were written for this project: everyday questions of different lengths, none from a public evaluation set.
Used by `bench`; files are read for `train-draft`, too.
"""

import gzip
import json
from pathlib import Path

from roost.errors import ConfigError

_KEYS = ("turns", "prompt", "text", "p")  # used by public data sets

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Explain to a ten-year-old why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five things to check before a long bicycle tour.",
    "How does a heat pump work? Answer in simple words.",
    "Write a Python function that tells whether a word reads the same backwards.",
    "My neighbour's dog barks at night. Draft a polite letter to him.",
    "What is the difference between weather and climate?",
    "Give me a recipe for a lentil soup with what most people have at home.",
    "Summarise the plot of a play about two families who are enemies and whose children fall in love.",
    "Why do leaves change their colour in autumn?",
    "Explain what a hash table is and when one should not use it.",
    "Plan a weekend in a small town by the sea for a family with two children.",
    "Translate into plain English: 'The party of the first part shall indemnify the party of the second part.'",
    "Write a haiku about the first snow.",
    "What should I know before I adopt an old cat?",
)


def read_turns(path: Path) -> list[list[str]]:
    """The conversations in a file, each a list of its user's messages.

    Each line is a JSON object with a prompt or turns, or plain text; .gz files are decompressed.
    """
    if not path.is_file():
        raise ConfigError(f"--prompts: there is no file {path}")
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from error
    # not splitlines: JSON strings may contain the other line separators
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts: {path} is empty")
    return [_turns(path, number, line) for number, line in lines]


def _turns(path: Path, number: int, line: str) -> list[str]:
    try:
        value = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line}
    except ValueError as error:
        raise ConfigError(f"--prompts: line {number} of {path} is not JSON") from error
    found = next((value[key] for key in _KEYS if key in value), None)
    given = found if isinstance(found, list) else [found]
    turns = [each for each in given if isinstance(each, str)]
    if not turns or len(turns) < len(given):
        raise ConfigError(f"--prompts: line {number} of {path} has no prompt")
    return turns
