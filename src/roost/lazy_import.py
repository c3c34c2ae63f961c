"""Lazy imports: registries name code as "module:name", so that reading them imports neither torch nor kernels.

The module is imported when the name is looked up. Called by whoever has chosen an entry of a registry.
"""

from importlib import import_module
from typing import Any


def load_symbol(path: str) -> Any:
    """What "module:name" stands for; the module is imported now."""
    module, _, name = path.partition(":")
    return vars(import_module(module))[name]
