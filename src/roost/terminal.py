"""Terminal: progress bars for downloads and for counts, drawn on standard error.

A download's bar appears with its first report, and nothing is drawn where standard error is not a terminal. Called by
the command line, and by the library if it is asked for a bar.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from roost.progress import Progress as ProgressCallback


@contextmanager
def download_bar(label: str = "fetching") -> Iterator[ProgressCallback]:
    """A bar for bytes done of bytes in all; it appears with the first report."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn(), console=console
    )
    with ExitStack() as drawn:

        def report(done_bytes: int, total_bytes: int) -> None:
            if not console.is_terminal:
                return
            if not bar.task_ids:
                drawn.enter_context(bar)
                bar.add_task(label)
            bar.update(bar.task_ids[0], completed=done_bytes, total=total_bytes)

        yield report


@contextmanager
def counting_bar(label: str, total: int, *, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar for things done of things in all."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal)) as progress:
        task = progress.add_task(label, total=total)
        yield lambda num_done: progress.update(task, completed=num_done)
