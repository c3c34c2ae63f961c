"""A planted bug: one source line swapped.

A seed must find it; where none can be expected to, a test is named that does.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One line swapped."""

    name: str
    module: str
    line: str
    replacement: str
    why: str
    test: str = ""  # the test that finds it, if no seed is to
