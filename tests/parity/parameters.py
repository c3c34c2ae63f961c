"""The sampling parameters as a table for docs/OPTIONS.md, made from their definitions and the dialects' tables."""

from dataclasses import Field, fields
from typing import Any

from roost.front.options import Options
from roost.sampling.params import SamplingParams
from roost.server.dialects import OPENAI, SGLANG, Dialect

TITLE = "## Sampling parameters"
HEADS = ("parameter", "default", "must be", "OpenAI's bodies", "SGLang's sampling_params", "flag", "what it is")


def section() -> list[str]:
    """The lines of the section."""
    given = {each.name: each for each in fields(Options)}
    rows = [list(HEADS), ["---"] * len(HEADS)]
    rows += [_row(each, given[each.name]) for each in fields(SamplingParams)]
    return [TITLE, "", *(f"| {' | '.join(row)} |" for row in rows)]


def _row(parameter: "Field[Any]", option: "Field[Any]") -> list[str]:
    flag = f"`--{option.name.replace('_', '-')}`" if option.metadata["flag"] else ""
    default = {None: "a new one", (): "none"}.get(option.default, str(option.default))
    allowed = parameter.metadata["allowed"]
    names = [_names(dialect, parameter.name) for dialect in (OPENAI, SGLANG)]
    return [f"`{parameter.name}`", default, str(allowed or ""), *names, flag, option.metadata["help"]]


def _names(dialect: Dialect, parameter: str) -> str:
    return " or ".join(f"`{name}`" for name in dialect.spellings(parameter))
