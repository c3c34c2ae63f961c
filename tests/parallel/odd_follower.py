"""A follower with a fault, for tests: the kind is the first argument, before the descriptor of its channel."""

import sys
import time

import torch

from roost.parallel import follower
from roost.runner.runner import Finish, Runner
from roost.step import StepPlan

AT_STEP = 8  # the fault, in the plan of this step
KINDS = ("another torch", "never comes", "another token", "breaks", "hangs", "as all")

run = Runner.run


def summing(self: Runner, plan: StepPlan) -> Finish:
    """A step that waits for the other ranks."""
    self.passes.model.ops.group.all_reduce(torch.zeros(1))
    return run(self, plan)


def main(kind: str) -> int:
    """Follow rank 0, oddly."""
    assert kind in KINDS, kind
    if kind == "another torch":
        follower.versions = lambda: {"torch": "1.0", "roost": "1.0"}
    if kind == "never comes":
        follower.FromRank0.join = lambda *args: sys.exit(3)  # type: ignore[method-assign]

    def odd(self: Runner, plan: StepPlan) -> Finish:
        if plan.step == AT_STEP and kind in ("breaks", "as all"):
            raise RuntimeError("as the test wants it")
        if plan.step == AT_STEP and kind == "hangs":
            time.sleep(3600)
        finish = summing(self, plan)
        if plan.step != AT_STEP or kind != "another token":
            return finish

        def another() -> object:
            result = finish()
            tokens = result.tokens.copy()
            tokens[0, 0] += 1
            return type(result)(**{name: getattr(result, name) for name in result.__slots__} | {"tokens": tokens})

        return another  # type: ignore[return-value]

    Runner.run = odd  # type: ignore[method-assign]
    return follower.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1)))
