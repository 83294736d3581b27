"""Settings of a model's own files that training cannot keep, and attention that is not fused."""

import logging
from collections.abc import Iterator

from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from grpo_replay.errors import first_line
from grpo_replay.recipe import ModelSection

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


SCORE_BYTES = 4
WARNING_BYTES = 2**30


def has_whole_scores(model: ModelSection, config: PreTrainedConfig, on_cuda: bool) -> bool:
    """Whether the trainer's attention stores the score of every pair of tokens."""
    if model.attn_implementation == "eager":
        return True
    heads = getattr(config, "num_attention_heads", None)
    grouped = getattr(config, "num_key_value_heads", None) not in (None, heads)
    sdpa = model.attn_implementation == "sdpa"
    return sdpa and on_cuda and model.dtype == "float32" and grouped


def float32_warning(
    model: ModelSection, config: PreTrainedConfig, longest: int, on_cuda: bool
) -> str | None:
    """A warning about a float32 policy on a GPU with rollouts of up to `longest` tokens.

    None if the scores take less than 1 GiB per layer or are not stored, and for eager attention,
    which the user chose.
    """
    if model.attn_implementation == "eager" or not has_whole_scores(model, config, on_cuda):
        return None
    size = config.num_attention_heads * longest**2 * SCORE_BYTES
    if size < WARNING_BYTES:
        return None
    return (
        f"model.dtype float32 on a GPU: torch has no fused attention for it, so one rollout of "
        f"{longest:,} tokens takes {size / 2**30:.1f} GiB of scores a layer "
        f"({config.num_attention_heads} heads); set model.dtype bfloat16, or sample shorter ones"
    )
