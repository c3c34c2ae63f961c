"""Environment: the only module that touches the process's environment variables.

Reads users' settings, and sets how libraries behave before any of them is imported. Imports none itself. Called when
the package is first imported, and wherever such a setting is needed.
"""

import os
from pathlib import Path

_SPINS = "3000"  # a few microseconds: 90 % of pure spinning on a quiet machine, as good as sleeping on a busy one
# variables whose values may be shown to others; of further ones of Roost's, only that they are set
_SHOWN = ("ROOST_CACHE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET")
_OURS = "ROOST_"  # how our variables begin
_NO_OPTIONS = ("ROOST_CACHE", "ROOST_SCREENSHOTS", "ROOST_TEST_")  # how those begin that stand for no option
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables that set how OpenMP's threads wait


def let_threads_sleep() -> None:
    """Make OpenMP's threads spin only briefly at barriers and then sleep, unless the user has configured it.

    As soon as anything else runs on the machine, a spinning thread takes the core from the thread it waits for; one
    that sleeps at once wakes late for each of many small operations. Has an effect only before torch is imported.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def cache_folder() -> Path:
    """Where downloaded models are kept: $ROOST_CACHE, or `roost` in the user's cache folder."""
    own = os.environ.get("ROOST_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roost"


def variable_of(name: str) -> str:
    """The variable of an option, by its field's name."""
    return _OURS + name.upper()


def option(name: str) -> tuple[str, str]:
    """The variable of an option, by its field's name, and its value; '' if it has none."""
    variable = variable_of(name)
    return variable, os.environ.get(variable, "")


def option_variables() -> list[str]:
    """All variables that are set, are not empty and look like an option's."""
    found = (name for name, value in sorted(os.environ.items()) if value and name.startswith(_OURS))
    return [name for name in found if not name.startswith(_NO_OPTIONS)]


def api_key() -> str:
    """The key for a running server: the one in $ROOST_API_KEY; '' without it."""
    return os.environ.get("ROOST_API_KEY", "")


def triton_folder() -> Path:
    """Where Triton keeps compiled kernels, by its own variables."""
    own = os.environ.get("TRITON_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def cuda_devices(count: int) -> tuple[str, ...]:
    """The first `count` devices that this process may use, as the system names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(number) for number in range(count)]
    return tuple(names[:count])


def with_device(name: str | None) -> dict[str, str]:
    """The environment of a process that sees one CUDA device of these alone; None: as this one."""
    return dict(os.environ) if name is None else {**os.environ, "CUDA_VISIBLE_DEVICES": name}


def shown_variables() -> dict[str, str]:
    """Variables that change how Roost runs, without the values of those that may hold a secret."""
    return {
        name: value if name in _SHOWN else "set"
        for name, value in sorted(os.environ.items())
        if name in _SHOWN or name.startswith(_OURS)
    }
