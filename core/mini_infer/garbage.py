"""Keeping Python's garbage collector out of the step loop.

A full collection walks every object of the process, torch's and transformers' half million included: tens of
milliseconds in the middle of a step. ``gc.freeze`` takes what exists now out of its sight.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen() -> Iterator[None]:
    """What exists on entry is not walked by collections inside; afterwards it is again.

    For loops that run long: each use puts off the next full collection. It is the whole process's, not to be nested.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
