"""No search for garbage while much is made that is none."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_pause() -> Iterator[None]:
    """Collect no garbage meanwhile.

    A large schedule is 300,000 tuples that stay and have no cycles. Searching them again and again
    while they are made takes as long as making them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
