"""Environment: the only module that knows the process's environment.

Reads what users say there, and tells libraries how to behave before any of them is loaded. Loads none itself. Called
when the package is first imported, and by whoever needs a setting of a user's.
"""

import os
from pathlib import Path

_SPINS = "3000"  # some microseconds: nine tenths of the rate of a quiet machine, as good as sleeping on a busy one
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads are told to wait


def let_threads_sleep() -> None:
    """Have OpenMP's threads spin at barriers for a moment only, and then sleep, unless the user says how they wait.

    Threads that spin take the core from the one they wait for as soon as anything else runs on the machine; those that
    sleep at once are late at the next of many small operations. Only what is set before torch is loaded counts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


def cache_folder() -> Path:
    """Where fetched models are kept: $ROOST_CACHE, or `roost` in the user's cache folder."""
    own = os.environ.get("ROOST_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roost"


def api_keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of a server: those given, or the one in $ROOST_API_KEY."""
    own = os.environ.get("ROOST_API_KEY")
    return given or ((own,) if own else ())
