"""Keeping the chatter of the libraries out of the terminal: it goes to the run's log."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTY = ("DeepSpeed", "deepspeed", "torch", "transformers", "datasets", "vllm", "filelock")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """While this lasts, warnings and log records of the libraries go to the log file alone."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DS_ACCELERATOR_LOG_LEVEL", "error")
    logging.captureWarnings(True)
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    send_to_log()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        logging.captureWarnings(False)


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """While this lasts, our own warnings are printed: for commands that keep no log."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    ours = logging.getLogger("grpo_replay")
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)


def send_to_log() -> None:
    """Take the libraries' own handlers away, so that the run's log gets what they say. To be
    called again after importing them, when their loggers exist."""
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in _CHATTY:
            library = logging.getLogger(name)
            library.handlers.clear()
            library.propagate = True
