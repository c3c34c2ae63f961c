"""What all tests share: examples may take their time; without a GPU, Triton runs kernels in its interpreter.

The latter is chosen before anything imports it.
"""

import os
from importlib.util import find_spec
from typing import Any

import hypothesis
import torch

hypothesis.settings.register_profile("patient", deadline=None)  # other work may run on the machine
hypothesis.settings.load_profile("patient")


def _let_loops_count() -> None:
    """Make the interpreter's scalars loop bounds again: numpy 2.4 turns no array of one number into an int."""
    from triton.runtime import interpreter  # noqa: PLC0415 - only now is it known how kernels run

    patch = interpreter._patch_lang_tensor

    def patch_and_count(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_and_count


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        _let_loops_count()
