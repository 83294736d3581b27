"""Settings of a model's own files that training cannot keep."""

import logging
from collections.abc import Iterator

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from grpo_replay.errors import first_line

logger = logging.getLogger(__name__)


def drop_unwritable_settings(policy: PreTrainedModel) -> list[str]:
    """transformers reads a generation_config.json that it refuses to write, such as a temperature
    without `do_sample`, which has no effect. Keep the special tokens only, and return a notice."""
    found = policy.generation_config
    try:
        found.validate(strict=True)
    except ValueError as error:
        policy.generation_config = GenerationConfig(
            eos_token_id=found.eos_token_id,
            pad_token_id=found.pad_token_id,
            bos_token_id=found.bos_token_id,
        )
        return [
            "checkpoints get only the special tokens of the model's generation settings, because "
            f"transformers cannot write the others: {first_line(error)}"
        ]
    return []


def switch_off_dropout(policy: PreTrainedModel) -> None:
    """Make the log-probs of a row the same in every forward pass. With dropout, behaviour log-probs
    would not be those of the policy that sampled, and ratios would be noise. config.json keeps its
    values."""
    for module, name in list(_dropouts(policy)):
        logger.debug("%s of %s is switched off", name, type(module).__name__)
        setattr(module, name, 0.0)


def _dropouts(policy: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Attributes that are probabilities of dropout, above zero. Functional dropout reads them
    from modules under names such as `attention_dropout` and `resid_pdrop`."""
    for module in policy.modules():
        for name, value in vars(module).items():
            named = "dropout" in name or "pdrop" in name
            named = named or (name == "p" and isinstance(module, nn.Dropout))
            if named and isinstance(value, float) and value > 0:
                yield module, name
