"""For `swift rlhf --rlhf_type grpo --external_plugins THIS_FILE`: GRPO trains with replay."""

import sys

from swift.trainers import TrainerFactory

from grpo_replay.errors import UsageError
from grpo_replay.integrations.swift import ReplayGRPOTrainer

if "swift.megatron" in sys.modules:
    raise UsageError(
        "replay in ms-swift: Megatron's GRPO is another trainer, in which nothing would be "
        "replayed: take `swift rlhf`, or leave this plugin out"
    )
_OURS = f"{ReplayGRPOTrainer.__module__}.{ReplayGRPOTrainer.__name__}"
_FOUND = TrainerFactory.TRAINER_MAPPING["grpo"]
if _FOUND not in (_OURS, "swift.rlhf_trainers.GRPOTrainer"):
    raise UsageError(
        f"replay in ms-swift: another plugin made {_FOUND} the trainer of grpo: derive it from "
        "grpo_replay.integrations.swift.ReplayMixin, which stands first, and leave this plugin out"
    )
TrainerFactory.TRAINER_MAPPING["grpo"] = _OURS
