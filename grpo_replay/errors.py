"""The exception tree. Every error reported to the user is one of these and has an exit code.

    GrpoReplayError                1
    ├── UsageError                 2   a wrong option or argument
    │   └── RecipeError            2   a value or combination in the recipe
    │       └── SweepFileError     2   a sweep file
    ├── DataError                  3   missing or bad data
    │   ├── DatasetError           3   a prompt set or benchmark
    │   ├── ModelError             3   a model folder, configuration or tokenizer
    │   │   └── NotFetchedError    3   one of the hub that is not in the local cache
    │   ├── SnapshotError          3   a buffer snapshot, rollout or draw file
    │   ├── CheckpointError        3   a checkpoint that is missing, partial or damaged
    │   ├── JournalError           3   the journal of an asynchronous run
    │   ├── EvaluationFileError    3   an evaluation report
    │   └── OutputDirectoryError   3   an output directory that is occupied or not writable
    └── SafetyStop                 4   training stopped to avoid wrong results
        ├── NonFiniteError         4   a loss or gradient that is not finite
        ├── LogprobGapError        4   sampler and trainer log-probs differ too much
        ├── RewardError            4   the reward function failed on most completions of a step
        ├── SamplerError           4   a sampler failed and could not be recovered
        │   └── ServersLost        4   no vLLM server is left; a checkpoint is written
        ├── CollectorError         4   the collector of an asynchronous run failed
        ├── LedgerError            4   rollouts were lost or counted twice
        └── LaunchError            4   ranks that cannot form a run

A message names the place, the value found, what is allowed, and what to do.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

INTERRUPTED = 130
"""Exit status of a command that stopped cleanly after SIGINT or SIGTERM."""
EXIT_AFTER_PEER = 143
"""Exit status of a rank that ends only because a peer failed, like that of SIGTERM. Our launcher
skips such ranks when it looks for the failed one."""


class GrpoReplayError(Exception):
    """Base class of all errors reported to the user. `exit_code` is the exit status."""

    exit_code = 1


class UsageError(GrpoReplayError):
    exit_code = 2


class RecipeError(UsageError):
    pass


class SweepFileError(RecipeError):
    pass


class DataError(GrpoReplayError):
    exit_code = 3


class DatasetError(DataError):
    pass


class ModelError(DataError):
    pass


class NotFetchedError(ModelError):
    pass


class SnapshotError(DataError):
    pass


class CheckpointError(DataError):
    pass


class JournalError(DataError):
    pass


class EvaluationFileError(DataError):
    pass


class OutputDirectoryError(DataError):
    pass


class SafetyStop(GrpoReplayError):
    exit_code = 4


class NonFiniteError(SafetyStop):
    pass


class LogprobGapError(SafetyStop):
    pass


class RewardError(SafetyStop):
    pass


class SamplerError(SafetyStop):
    pass


class ServersLost(SamplerError):
    """No vLLM server is left. The run writes a checkpoint before it ends."""


class CollectorError(SafetyStop):
    pass


class LedgerError(SafetyStop):
    pass


class LaunchError(SafetyStop):
    pass


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'ratio'?)`, or an empty string if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def no_such_path(path: Path) -> str:
    """`PATH does not exist`, with a similar name of the same folder."""
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    return f"{path} does not exist{did_you_mean(path.name, siblings)}"
