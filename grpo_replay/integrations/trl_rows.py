"""Conversion between TRL's generation batch, a dict of padded tensors, and rollouts.

Shapes: B rows of a process, P and T longest prompt and completion, F reward functions.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from grpo_replay.errors import UsageError
from grpo_replay.integrations.host_rows import Row
from grpo_replay.types import Rollout

Tensors = dict[str, torch.Tensor]

EXTRAS = {
    "importance_sampling_ratio": 1.0,  # of vLLM's log-probs; [T], or [1] for a sequence ratio
    "ref_per_token_logps": -1e4,
}
"""Per-row tensors of TRL that are stored with a rollout, and their padding. TRL computes its loss
where no token trains, too, and multiplies it by 0: it must be finite there for every log-prob of
the policy, exp(ref - policy) of the KL term included."""

KNOWN = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "tool_mask",
    "num_items_in_batch", "old_per_token_logps", "sampling_per_token_logps",
}  # fmt: skip

ROW = "replay_row"
"""Key of the tensor with the index of each row in the composed batch; -1 for padding."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts and scores of the rows of a process: `prompts` and `completions` are texts or lists
    of messages, `token_ids` the tokens of the completions without padding, `scores_BF` the values
    of the reward functions (NaN where one returned None)."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    token_ids: Sequence[Sequence[int]]
    scores_BF: np.ndarray


def rows_of(
    output: Tensors, texts: Texts | None, weights_F: np.ndarray, eos_ids: Collection[int],
    extras: Mapping[str, float] = EXTRAS,
) -> list[Row]:  # fmt: skip
    """Convert a process's part of a generation batch to rows; a reward is the weighted sum of its
    scores. `extras` are the per-row tensors that are stored, with their padding.

    Raises UsageError for tensors that cannot be stored with a rollout, and if `texts` has other
    rows than the batch.
    """
    if unknown := sorted(set(output) - KNOWN - set(extras)):
        raise UsageError(
            f"the generation batch has {', '.join(unknown)}: replay stores text, tokens, masks and "
            "log-probs, and what a subclass names in stored_keys; no images"
        )
    if output["advantages"].dim() != 1:
        raise UsageError(
            f"advantages have shape {tuple(output['advantages'].shape)}: replay needs one for each "
            "completion"
        )
    _refuse_others(output, texts)
    assert texts is not None
    arrays = {name: value.cpu() for name, value in output.items() if value.dim() > 0}
    rewards_B = np.nansum(texts.scores_BF * weights_F, axis=1).astype(np.float32)
    rewards_B[np.isnan(texts.scores_BF).all(axis=1)] = np.nan
    return [
        _row(
            {name: array[i] for name, array in arrays.items()},
            texts.prompts[i], texts.completions[i], texts.token_ids[i], texts.scores_BF[i],
            rewards_B[i], eos_ids, extras,
        )
        for i in range(len(rewards_B))
    ]  # fmt: skip


def _refuse_others(output: Tensors, texts: Texts | None) -> None:
    """Raises UsageError if `_calculate_rewards` was called with other rows than the batch has."""
    scored = [] if texts is None else [list(ids) for ids in texts.token_ids]
    batch = output["completion_ids"].tolist()
    pairs = zip(batch, scored, strict=False)
    if len(scored) != len(batch) or any(row[: len(ids)] != ids for row, ids in pairs):
        raise UsageError(
            f"the last call of _calculate_rewards scored {len(scored)} completions that are not "
            f"the {len(batch)} of the generation batch, in its order: replay "
            "stores the rewards of a batch from one call with all its completions"
        )


def _row(
    tensors: Tensors, prompt: Any, completion: Any, token_ids: Sequence[int],
    scores_F: np.ndarray, reward: float, eos_ids: Collection[int], extras: Mapping[str, float],
) -> Row:  # fmt: skip
    """Convert one row of the batch; `reward` is NaN if missing. Tensors are cut to its tokens."""
    length = len(token_ids)

    def per_token(name: str) -> torch.Tensor:
        return tensors[name][:length]

    behavior_T = per_token("old_per_token_logps").float().numpy()
    sampler_T = None
    if "sampling_per_token_logps" in tensors:  # NaN where vLLM has none: the trainer's stands in
        sampler_T = per_token("sampling_per_token_logps").float().numpy()
        sampler_T = np.where(np.isnan(sampler_T), behavior_T, sampler_T)
    rewarded = not np.isnan(reward)
    scores = scores_F.tolist() if rewarded and len(scores_F) > 1 else ()
    return Row(
        prompt_id=hashlib.sha256(json.dumps(prompt, default=str).encode()).hexdigest()[:16],
        prompt_token_ids=tensors["prompt_ids"][tensors["prompt_mask"].bool()],
        completion_token_ids=np.array(token_ids, np.int32),
        completion_text=_text(completion),
        behavior_logprobs=behavior_T,
        sampler_logprobs=sampler_T,
        reward=float(reward) if rewarded else None,
        reward_scores=tuple(scores),
        advantage=float(tensors["advantages"]),
        truncated=not (token_ids and token_ids[-1] in eos_ids),
        trains=bool(tensors["completion_mask"].any()),  # not if `mask_truncated_completions`
        completion_mask=per_token("tool_mask").bool() if "tool_mask" in tensors else None,
        extras={name: per_token(name).float() for name in extras if name in tensors},
    )


def _text(completion: Any) -> str:
    """Returns a completion as text: of messages their contents and tool calls, line by line."""
    if isinstance(completion, str):
        return completion
    parts = []
    for message in completion:
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        parts += [
            str(message.get("content") or ""),
            *(json.dumps(call, default=str) for call in calls),
        ]
    return "\n".join(part for part in parts if part)


def to_tensors(
    rollouts: Sequence[Rollout], rows: Sequence[int], like: Tensors, padding_id: int,
    multiple: int | None = None, extras: Mapping[str, float] = EXTRAS,
) -> Tensors:  # fmt: skip
    """Make a generation batch of the rollouts, with the keys of `like`. `rows[i]` is the index of
    `rollouts[i]` in the composed batch, or -1 for padding, of which no token trains. Prompts and
    completions are padded to a multiple of `multiple` tokens. Raises UsageError for a rollout
    without one of the `extras` of `like`."""
    padded, real_B = partial(_padded, multiple=multiple or 1), torch.tensor(rows) >= 0

    def numbers(arrays: Sequence[Any], value: float) -> torch.Tensor:
        """Pad the arrays; rows of padding have `value` throughout."""
        pairs = zip(arrays, real_B, strict=True)
        return padded([a if real else np.full_like(a, value) for a, real in pairs], value)

    prompts = [rollout.prompt_token_ids for rollout in rollouts]
    tokens = [rollout.completion_token_ids for rollout in rollouts]
    lengths = [np.full(len(ids), bool(real)) for ids, real in zip(tokens, real_B, strict=True)]
    advantages_B = torch.tensor([rollout.advantage or 0.0 for rollout in rollouts])
    batch = {
        "prompt_ids": padded(prompts, padding_id, torch.long, "left"),
        "prompt_mask": padded([np.ones_like(ids) for ids in prompts], 0, torch.long, "left"),
        "completion_ids": padded(tokens, padding_id, torch.long),
        "completion_mask": padded(lengths, 0, torch.long),
        "advantages": advantages_B * real_B,
        "old_per_token_logps": numbers([rollout.behavior_logprobs for rollout in rollouts], 0.0),
        ROW: torch.tensor(rows),
    }
    if "tool_mask" in like:
        pairs = zip([rollout.completion_mask for rollout in rollouts], tokens, strict=True)
        masks = [np.ones(len(ids), bool) if mask is None else mask for mask, ids in pairs]
        batch["tool_mask"] = padded(masks, 1, torch.long)
    if "sampling_per_token_logps" in like:
        sampler = [rollout.sampler_logprobs for rollout in rollouts]
        batch["sampling_per_token_logps"] = numbers(sampler, 0.0)
    for name in extras.keys() & like.keys():
        if any(name not in rollout.extras for rollout in rollouts):
            raise UsageError(
                f"the generation batch has {name}, and an older rollout was stored without it: put "
                "what stored_keys names into every batch, or train in a new output_dir"
            )
        values_BT = numbers([rollout.extras[name] for rollout in rollouts], extras[name])
        is_per_sequence = like[name].shape != like["completion_ids"].shape  # [B, 1]
        batch[name] = values_BT[:, :1] if is_per_sequence else values_BT
    return {name: tensor.to(like["prompt_ids"].device) for name, tensor in batch.items()}


def _padded(
    arrays: Sequence[Any],
    value: float,
    dtype: torch.dtype = torch.float32,
    side: str = "right",
    multiple: int = 1,
) -> torch.Tensor:
    """Pad the arrays to the length of the longest, rounded up to a multiple."""
    rows = [torch.tensor(array, dtype=dtype) for array in arrays]
    rows_BT = pad_sequence(rows, True, value, side)
    missing = -rows_BT.size(1) % multiple
    return pad(rows_BT, (missing, 0) if side == "left" else (0, missing), value=value)


def trained_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Bool [B, T]: True for completion tokens that train."""
    return (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
