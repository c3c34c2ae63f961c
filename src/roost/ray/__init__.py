"""Replicas on Ray Serve, behind a router that knows sessions; `roost.ray:app` needs the extra `ray`."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """The application; Ray is imported when it is asked for."""
    if name != "app":
        raise AttributeError(f"module 'roost.ray' has no attribute {name!r}")
    return import_module("roost.ray.build").app
