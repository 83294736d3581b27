"""The Hugging Face hub and its local cache, as far as a dry run needs them."""

import contextlib
import os
import socket
from collections.abc import Iterator
from urllib.parse import urlparse

_HUB_SECONDS = 3.0


def hub_is_reachable() -> bool:
    """True if the Hugging Face hub answers within three seconds (HF_ENDPOINT, HF_HUB_OFFLINE)."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return False
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_HUB_SECONDS).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def cache_only_if_unreachable() -> Iterator[None]:
    """Read only the local cache if the hub does not answer, which avoids the libraries' retries."""
    if hub_is_reachable():
        yield
        return
    import datasets.config
    import huggingface_hub.constants

    switches = [(huggingface_hub.constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in switches]
    for module, name in switches:
        setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)


def weights_are_cached(path: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    names = ("model.safetensors", "model.safetensors.index.json")
    return any(isinstance(try_to_load_from_cache(path, n, revision=revision), str) for n in names)
