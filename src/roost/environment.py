"""Environment: what is said to libraries through the process's environment, before any of them is loaded.

Never loads one itself. Called when the package is first imported.
"""

import os

_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # how OpenMP's threads are told to wait


def let_threads_sleep() -> None:
    """Have OpenMP's threads sleep at barriers instead of spinning, unless the user says how they shall wait.

    Threads that spin take the core from the one they wait for as soon as anything else runs on the machine. Only what
    is set before torch is loaded counts.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
