"""Checks once whether this process can reach the Hugging Face hub."""

import functools
import logging
import os
import socket
import sys
from urllib.parse import urlsplit
from urllib.request import getproxies

_CONNECT_SECONDS = 5

logger = logging.getLogger(__name__)


@functools.cache
def use_cache_without_hub() -> None:
    """Switch the hub's libraries to their cache, like HF_HUB_OFFLINE=1, if the hub cannot be
    reached: they would retry every file for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError as error:
        logger.warning("%s cannot be reached (%s): only its cache is read", hub.hostname, error)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for what is not imported yet, and for processes
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
