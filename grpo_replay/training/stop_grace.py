"""Is there time to stop? From SIGTERM on a run finishes its step and writes a checkpoint."""

import math
import os

from grpo_replay.distributed.environment import rank_environment
from grpo_replay.distributed.failures import LAUNCH_FOLDER_VARIABLE

LAUNCHER_GRACE_SECONDS = {"slurm": 30.0, "deepspeed": 30.0, "torchrun": 30.0}
"""What launchers leave between SIGTERM and SIGKILL as they come: Slurm's KillWait, and the
time-outs in the sources of DeepSpeed's launcher and torchrun's agent. Our own waits."""


def grace_seconds(setting: float | None) -> float:
    """Seconds from SIGTERM to SIGKILL: `run.stop_grace_seconds`, else the launcher's."""
    if setting is not None:
        return setting
    if LAUNCH_FOLDER_VARIABLE in os.environ:
        return math.inf
    return LAUNCHER_GRACE_SECONDS.get(rank_environment().launcher, math.inf)


def notice_of_grace(grace: float, step_seconds: float, checkpoint_seconds: float) -> str | None:
    """What to tell the user if a step and a checkpoint take longer than the grace; else None."""
    needed = step_seconds + checkpoint_seconds
    if needed <= grace:
        return None
    ask = 60 * math.ceil(2 * needed / 60)
    return (
        f"a step ({step_seconds:.0f} s at most so far) and a checkpoint "
        f"({checkpoint_seconds:.0f} s) take longer than the {grace:.0f} s between SIGTERM and "
        "SIGKILL here (run.stop_grace_seconds, or the launcher's own): a run that is told to stop "
        "is killed before its checkpoint is complete, and resumes from the one before. With Slurm "
        f"ask for more, #SBATCH --signal=TERM@{ask}, and set run.stop_grace_seconds to {ask}; or "
        "lower checkpoint.every_steps"
    )
