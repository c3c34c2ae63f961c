"""Nursery: a process that has imported what takes long, and forks for every trial; nothing of Roost is in it.

`python -m tests.planted.nursery` reads lines `NAME FIRST COUNT` and answers each with the last line its trial printed,
or with `broke`. Used by the tests of the planted bugs, of which hundreds would each import torch again.
"""

import os
import subprocess
import sys
import tempfile
import traceback
from typing import Self

from tests.planted.apply import ROOT
from tests.planted.bug import Bug

_FAMILIES = ("gemma3", "llama", "mistral", "qwen2", "qwen3")
_SLOW = (
    *("hypothesis.strategies", "numpy", "pytest", "safetensors.torch", "torch"),
    *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
)


class Nursery:
    """The process, from the outside."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.planted.nursery"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("")  # no more lines: it ends

    def trial(self, bug: Bug, first: int, count: int) -> tuple[int, str] | None:
        """What `tests.planted.__main__.trial` says, sooner."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{bug.name} {first} {count}\n")
        stdin.flush()
        answer = stdout.readline().rstrip("\n")
        if answer == "survived":
            return None
        seed, tab, check = answer.partition("\t")
        if not tab:
            raise RuntimeError(f"{bug.name}: the trial itself broke: {answer}")
        return int(seed), check


def main() -> None:
    """Import, then fork for every line."""
    for name in _SLOW:
        __import__(name)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                os._exit(_child(line.split(), said.fileno()))
            _, status = os.waitpid(child, 0)
            said.seek(0)
            last = said.read().strip().split("\n")[-1]
        print(last if status == 0 else f"broke: {last}", flush=True)


def _child(arguments: list[str], said: int) -> int:
    """One trial, in a process of its own; its exit status."""
    os.dup2(said, sys.stdout.fileno())
    sys.argv[1:] = arguments
    try:
        from tests.planted.trial import main as trial  # noqa: PLC0415 (its imports are the trial's)

        trial()
    except BaseException:  # noqa: BLE001 (whatever it was, the parent is told)
        traceback.print_exc(file=sys.stdout)
        return 1
    finally:
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    main()
