"""The environment for a program that is no rank: libraries leave a rank's in a test process."""

import os

RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
