"""Loading of large libraries, and their warnings, which go to the run's log; and removal of secrets
from logs, the screen and recorded commands."""

import atexit
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

SHORTEST_SECRET = 8
"""In characters. A shorter value of a variable may be a word that occurs anywhere."""

_SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|ACCESS_KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD)$", re.I)
_USERINFO = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_TOKEN = re.compile(
    r"\b(?:hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{30,}|github_pat_\w{30,}|AKIA[A-Z0-9]{16})"
)


def without_secrets(text: str) -> str:
    """Replace by `***` user names and passwords in URLs, words that look like tokens of well-known
    services, and the values of environment variables whose names denote secrets."""
    for value in _secrets_of_environment():
        text = text.replace(value, "***")
    return _TOKEN.sub("***", _USERINFO.sub("***", text))


def _secrets_of_environment() -> list[str]:
    """Returns values of secret variables, but no paths; longest first: one may contain another."""
    values = {value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)}
    secrets = [v for v in values if len(v) >= SHORTEST_SECRET and not v.startswith("/")]
    return sorted(secrets, key=len, reverse=True)


class RedactingFormatter(logging.Formatter):
    """Formats log lines, tracebacks included, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


_LIBRARIES = ("DeepSpeed", "deepspeed", "torch", "transformers", "datasets", "vllm", "filelock")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Send warnings and log records of libraries to the log file only, inside this context."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    _hide_progress_bars()
    os.environ.setdefault("DS_ACCELERATOR_LOG_LEVEL", "error")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # NCCL's warnings go past logging
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


def _hide_progress_bars() -> None:
    """Hide the bars of huggingface_hub, datasets and transformers, unless the user wants them. They
    read the variable at import, which may be over."""
    if os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1") != "1":
        return
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    if (transformers := sys.modules.get("transformers.utils.logging")) is not None:
        transformers.disable_progress_bar()


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print our own warnings inside this context, for commands that write no log file."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(RedactingFormatter("warning: %(message)s"))
    ours = logging.getLogger("grpo_replay")
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)


def send_to_log() -> None:
    """Remove the libraries' own handlers, so that their records reach the run's log.

    Call it again after importing a library, which creates loggers.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.split(".")[0] in _LIBRARIES:
            library = logging.getLogger(name)
            library.handlers.clear()
            library.propagate = True


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Import without garbage collection: scanning the objects of torch and transformers, none of
    which is garbage, takes a fifth of the time. Later collections skip these objects.

    Uncollected garbage would be kept too, so use it before there is much. Only the collection at
    exit includes these objects again, because some libraries report what is still alive then.
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
