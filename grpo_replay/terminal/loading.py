"""Loading large libraries."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Import without garbage collection: looking through the objects of torch and transformers,
    none of which is garbage, takes a fifth of the time. Later collections skip these objects.

    Garbage that waits to be collected would be kept too, so use it before there is any of size.
    Only the collection at exit includes them again, because some libraries report objects that are
    still alive then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.unregister(gc.unfreeze)
        atexit.register(gc.unfreeze)
    finally:
        if was_enabled:
            gc.enable()
