"""Identity: what all ranks must have alike, as texts by name: versions, the checkpoint's files, the configuration.

A checkpoint is known by its files' names and lengths, its configs, and the headers that name its tensors, types and
shapes; its weights are not read. Called by every rank at start-up, before it loads and when it has.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import roost
from roost.clients import ClientLimits
from roost.config.options import EngineConfig
from roost.config.resolved import Resolved

_HEADER_BYTES = 2**20  # at the beginning of a file with tensors: names, types and shapes of all, or most of them
_TENSORS, _CONFIGS = (".safetensors", ".gguf"), (".json", ".jinja", ".model", ".txt")
_SCHEDULERS_OWN = ("clients", "session", "backend", "drafter")  # of no meaning to a follower, or compared by name


def versions() -> dict[str, str]:
    """Of what computes."""
    return {"torch": torch.__version__, "roost": roost.__version__}


def checkpoint_of(*paths: Path) -> dict[str, str]:
    """Of files or folders: each file's length and a digest of what names its tensors, or of all of a config."""
    found: dict[str, str] = {}
    for path in paths:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
        for file in files:
            if file.suffix in (*_TENSORS, *_CONFIGS):
                found[str(file)] = f"{file.stat().st_size} bytes, {_digest(file)}"
    return found


def _digest(file: Path) -> str:
    limit = _HEADER_BYTES if file.suffix in _TENSORS else -1
    with file.open("rb") as opened:
        return blake2b(opened.read(limit), digest_size=8).hexdigest()


def configuration(resolved: Resolved, **more: object) -> dict[str, str]:
    """What a configuration comes to."""
    numbers = {each.name: getattr(resolved, each.name) for each in fields(resolved) if each.name not in _SCHEDULERS_OWN}
    names = {"backend": resolved.backend.name, "drafter": None if resolved.drafter is None else resolved.drafter.name}
    return {name: str(value) for name, value in {**numbers, **names, **more}.items()}


def differences(own: Mapping[str, str], other: Mapping[str, str]) -> Iterable[str]:
    """What differs, as people are told."""
    for name in sorted(own.keys() | other.keys()):
        if own.get(name) != other.get(name):
            yield f"{name} is {own.get(name, 'missing')} here and {other.get(name, 'missing')} there"


def as_text(config: EngineConfig) -> str:
    """A configuration as JSON, for a process that is started."""
    return json.dumps(asdict(config))


def from_text(text: str) -> EngineConfig:
    """The configuration in a text."""
    given: dict[str, Any] = json.loads(text)
    clients = tuple(ClientLimits(**each) for each in given.pop("clients"))
    groups = EngineConfig()
    return replace(
        groups, clients=clients, **{name: type(getattr(groups, name))(**values) for name, values in given.items()}
    )
