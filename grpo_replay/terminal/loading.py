"""Loading large libraries."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Import without garbage collection: looking through the objects of torch and transformers,
    none of which is garbage, takes a fifth of the time. Later collections leave them out, but for
    the last: libraries report at exit what it does not free."""
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)
    finally:
        gc.enable()
