"""Roost: an LLM serving engine for conversations.

`roost.LLM` and what it is told are loaded when they are first asked for: importing the package alone is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from roost.environment import let_threads_sleep

let_threads_sleep()  # before anything loads torch

__version__ = "0.1.0"  # the only place: pyproject.toml, the server and the command line read it here

if TYPE_CHECKING:  # what type checkers see: the same names as below
    from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SessionConfig, SpecConfig
    from roost.front.options import Options
    from roost.library.llm import LLM

_HOMES = {
    "LLM": "roost.library.llm",
    "EngineConfig": "roost.config.options",
    "MemoryConfig": "roost.config.options",
    "ModelConfig": "roost.config.options",
    "Options": "roost.front.options",
    "SchedConfig": "roost.config.options",
    "SessionConfig": "roost.config.options",
    "SpecConfig": "roost.config.options",
}
__all__ = [
    "LLM",
    "EngineConfig",
    "MemoryConfig",
    "ModelConfig",
    "Options",
    "SchedConfig",
    "SessionConfig",
    "SpecConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """A public name, from the module that has it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
