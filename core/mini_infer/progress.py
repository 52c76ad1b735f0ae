"""Progress bars on stderr; none when it is not a terminal.

Contract: rich is imported only when a bar is shown.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from mini_infer.frontend.text_request import TextRequest

Item = TypeVar("Item")


@contextmanager
def generation_progress(total: int) -> Iterator[Callable[[Sequence[TextRequest]], None]]:
    """A bar over requests, with tokens a second; gives a function to call after each step."""
    if not sys.stderr.isatty():
        yield lambda requests: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tok/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, rate=0.0)

        def show(requests: Sequence[TextRequest]) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            if elapsed <= 0.0:
                return
            tokens = sum(request.num_tokens() for request in requests)
            bar.update(task, completed=sum(r.finished for r in requests), rate=tokens / elapsed)

        yield show


def loading_progress(weights: Iterable[tuple[str, Tensor]], num_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The same weights, with a bar over the bytes that passed.

    Args:
        weights: as a ``WeightLoader`` gives them.
        num_bytes: of all parameters together.
    """
    if not sys.stderr.isatty():
        yield from weights
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_bytes)
        for name, tensor in weights:
            yield name, tensor
            bar.advance(task, tensor.nbytes)


def counted_progress(label: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """The same items, with a bar that counts them."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total)
