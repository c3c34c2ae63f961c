"""Terminal: bars for what takes a while, drawn on standard error.

On something that is not a terminal nothing is drawn. Called by the command line and the engine's process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from roost.progress import Progress as Told


@contextmanager
def loading_bar(label: str = "loading") -> Iterator[Told]:
    """A bar for bytes done of bytes in all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done_bytes, total_bytes: progress.update(task, completed=done_bytes, total=total_bytes)


@contextmanager
def counting_bar(label: str, total: int, *, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar for things done of things in all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda num_done: progress.update(task, completed=num_done)
