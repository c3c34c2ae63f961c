"""Checks of the engine, for `roost doctor`: what it would choose and why, and whether it generates.

A default model that has not been downloaded is replaced by a tiny random one; nothing is fetched. Called by `doctor`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from signal import Signals
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from roost.attention.registry import AUTO_BACKEND, BACKENDS
from roost.cli.check_report import ReportSection
from roost.config.options import AUTO, EngineConfig
from roost.drafters.registry import NO_DRAFTER
from roost.errors import RoostError

if TYPE_CHECKING:
    from roost.startup import EngineChoices

_PATIENCE_S = 600  # large models take minutes to load
_ASKED = "as asked for"
_NOT_SHOWN = ("model", "warnings")  # of the settings: a path, and what is said in notes
_REMEDY = "change the option that is named, or report it with this output"


@contextmanager
def runnable(config: EngineConfig) -> Iterator[tuple[EngineConfig, bool]]:
    """A configuration whose model is there, and whether that is the tiny random one."""
    from roost.cli.random_model import write_random_model  # noqa: PLC0415 (needs torch)
    from roost.weights.pull import default_file  # noqa: PLC0415 (rarely needed)

    if config.model.model != "default" or default_file().is_file():
        yield config, False
        return
    with TemporaryDirectory(prefix="roost-") as folder:
        write_random_model(Path(folder))
        yield replace(config, model=replace(config.model, model=folder)), True


def choices(section: ReportSection, config: EngineConfig) -> None:
    """What the engine would choose, and why; no weights are read."""
    from roost.startup import choose, choose_weights, forms_of  # noqa: PLC0415 (needs torch)
    from roost.weights.load import open_source  # noqa: PLC0415

    with runnable(config) as (tried, is_random):
        if is_random:
            section.notes.append("the default model is not there: a tiny random model stands in for it")
        try:
            chosen = choose(tried)
            source, asked = open_source(chosen.path), tried.model.weights
            weights = choose_weights(
                asked, source.form, forms_of(chosen.device, chosen.backend), stored=source.stored_form
            )
        except RoostError as error:
            section.broken(str(error), _REMEDY)
            return
    found = "as it is stored" if weights in (source.form, source.stored_form) else "the device's default"
    section.facts |= {
        "model": "a tiny random one" if is_random else chosen.name,
        "device": f"{chosen.device} ({_why_device(chosen, config)})",
        "backend": f"{chosen.backend.name} ({_why_backend(chosen, config)})",
        "weights": f"{weights} ({found if asked == AUTO else _ASKED})",
        "kv_cache_dtype": chosen.backend.kv_cache_dtype(config.memory.kv_cache_dtype, weights),
        "speculation": f"{chosen.config.spec.spec} ({_why_drafter(chosen, config)})",
        "threads": config.model.threads or "all cores that torch sees",
    }


def _why_device(chosen: "EngineChoices", config: EngineConfig) -> str:
    if config.model.device != "auto":
        return _ASKED
    return "there is one" if chosen.device.type == "cuda" else "torch finds no CUDA device"


def _why_backend(chosen: "EngineChoices", config: EngineConfig) -> str:
    """Why a backend was chosen, and why each other one that is made for the device was not."""
    if config.model.backend != AUTO_BACKEND:
        return _ASKED
    device = chosen.device.type
    others = [each for each in BACKENDS if device in each.default_for and each is not chosen.backend]
    said = [f"{each.name} {each.obstacle() or 'does not take these weights or this KV'}" for each in others]
    return "; ".join(said) or f"the default on {device}"


def _why_drafter(chosen: "EngineChoices", config: EngineConfig) -> str:
    if config.spec.spec is not None:
        return _ASKED
    if config.spec.draft is not None:
        return "the head that --draft names"
    if chosen.config.spec.spec == NO_DRAFTER:
        return "no draft head is known for this model"
    return "the model comes with a draft head"


def self_test(section: ReportSection, config: EngineConfig) -> None:
    """Start an engine in a process of its own and have it generate the same twice."""
    with runnable(config) as (tried, is_random):
        said = _run(section, tried)
    if said is None:
        return
    settings = said.pop("settings")
    section.facts |= {name: value for name, value in said.items() if value is not None}
    if is_random:
        section.facts["model"] = "a tiny random one"
    section.facts |= {name: value for name, value in settings.items() if name not in _NOT_SHOWN}
    section.notes += settings.get("warnings", [])
    if said["failed_steps"]:
        section.broken(f"{said['failed_steps']} steps failed on the device", "report it, with this output")
    is_exact = settings["device"] == "cpu" and settings["weights"] != "bf16"
    if not said["same_twice"] and is_exact:
        section.broken("the same prompt gave two different texts", "report it, with this output")


def _run(section: ReportSection, config: EngineConfig) -> dict[str, Any] | None:
    """What the self-test's process says; None if it failed, which is a problem then."""
    command = [sys.executable, "-m", "roost.cli.self_test"]
    groups = {name: given for name, given in asdict(config).items() if name != "clients"}  # a server's
    asked = json.dumps(groups).encode()
    try:
        ran = subprocess.run(command, input=asked, capture_output=True, check=False, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        section.broken(f"the self-test did not end within {_PATIENCE_S} s", "report it, with this output")
        return None
    said = ran.stderr.decode(errors="replace").strip().splitlines()
    if ran.returncode == 0:
        result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        if "error" not in result:
            return result
        section.broken(result["error"], _REMEDY)
        return None
    how = f"was ended by {Signals(-ran.returncode).name}" if ran.returncode < 0 else f"ended with {ran.returncode}"
    section.broken(f"the self-test {how}: {said[-1] if said else 'it said nothing'}", _remedy_for(ran.returncode))
    return None


def _remedy_for(code: int) -> str:
    """What to do about the end of a process."""
    if code == -Signals.SIGKILL:
        return "most likely the memory was used up: lower --pool-tokens or --context, or take a smaller model"
    if code == -Signals.SIGILL:
        return "the CPU lacks an instruction: try --backend torch, and report it with this output"
    return "try --backend torch, and report it with this output"
