"""`python -m grpo_replay.distributed.entry PAYLOAD`: what our launcher starts as a rank.

The payload carries the command line as base64, because remote shells would expand it.
"""

import importlib
import os
import sys

from grpo_replay.distributed.environment import stop_with_parent
from grpo_replay.distributed.failures import exit_as_rank
from grpo_replay.distributed.launch import decode_payload


def main() -> None:
    payload = decode_payload(sys.argv[1])
    # The parent is unknown if DeepSpeed's launcher started this process on another machine.
    stop_with_parent(payload.parent_pid or os.getppid())
    os.environ.update(payload.environment)
    sys.argv = ["grpo-replay", *payload.arguments]
    module, _, function = payload.entry.partition(":")
    exit_as_rank(getattr(importlib.import_module(module), function))


if __name__ == "__main__":
    main()
