"""Converts verl's rows, which are tensors in TransferQueue, to groups of completions, and rollouts
back to rows; lays out a step for verl's actor. Shapes: T tokens of a response, P of a prompt."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import torch
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from grpo_replay.errors import UsageError
from grpo_replay.integrations.host import Row
from grpo_replay.integrations.outcomes import outcomes_of
from grpo_replay.types import Rollout, RolloutOutcome

EXTRAS = ("ref_log_prob", "rollout_is_weights")
"""Fields [T] of birth that verl's loss reads, if the configuration asks for them."""
FIELDS = (
    "prompts", "responses", "response_mask", "old_log_probs", "advantages", "rm_scores",
    "rollout_log_probs", *EXTRAS,
)  # fmt: skip
ROW, OUTCOMES = "replay_row", "replay_outcomes"
"""The field with a row's index in the composed batch, -1 for padding; the key of the outcomes in
verl's metrics."""


def groups_of(
    keys: Sequence[str], data: Any, group_size: int, text_of: Callable[[Any], str], longest: int
) -> list[list[Row]]:
    """Group verl's rows by prompt; `keys` are PROMPT_SESSION_OUTPUT. `data` has the fields of the
    rows, `text_of` decodes tokens; a completion of `longest` tokens counts as truncated, as in
    verl's `response_length/clip_ratio`. Groups and their rows are sorted by tokens, because verl's
    order is that of arrival. A session without output is a completion without reward. Raises
    UsageError for several outputs of a session, and advantages per token.
    """
    columns = {name: [row.cpu() for row in data[name].unbind()] for name in data.keys()}  # noqa: SIM118
    members: dict[str, list[Row]] = {}
    for i, key in enumerate(keys):
        prompt, _, output = key.rsplit("_", 2)
        if output != "0":
            raise UsageError(
                "replay in verl: an agent loop gave several outputs for a session, each with a "
                "prompt of its own: let it return one output, with response_mask 0 for tools"
            )
        fields = {name: column[i] for name, column in columns.items()}
        members.setdefault(prompt, []).append(_row(fields, text_of, longest))
    for group in members.values():
        group.sort(key=_tokens)
        missing = Row(group[0].prompt_token_ids, [], [], reward=None, advantage=0.0)
        group += [missing] * (group_size - len(group))
    return sorted(members.values(), key=lambda group: list(map(_tokens, group)))


def _tokens(row: Row) -> tuple[list[int], list[int]]:
    return row.prompt_token_ids.tolist(), row.completion_token_ids.tolist()


def _row(fields: Mapping[str, Any], text_of: Callable[[Any], str], longest: int) -> Row:
    """Convert a row of verl's batch. Raises UsageError if its advantages differ by token."""
    mask_T, tokens_T = fields["response_mask"].bool(), fields["responses"]
    values = fields["advantages"][mask_T].tolist() or [0.0]
    if len(set(values)) > 1:
        raise UsageError("replay in verl: a row has several advantages, and a rollout has one")
    return Row(
        prompt_token_ids=fields["prompts"],
        completion_token_ids=tokens_T,
        behavior_logprobs=fields["old_log_probs"],
        reward=float(fields["rm_scores"].sum()),
        advantage=values[0],
        sampler_logprobs=fields.get("rollout_log_probs"),
        completion_mask=None if mask_T.all() else mask_T,
        completion_text=text_of(tokens_T),
        truncated=len(tokens_T) >= longest,
        extras={name: fields[name].float() for name in EXTRAS if name in fields},
    )


def layout(
    split: Sequence[np.ndarray], lengths: Sequence[int], ranks: int, micro_batch: int
) -> tuple[list[int], int]:
    """Order the rows of a step for verl; -1 is padding. Returns the order and the mini-batch size.
    verl gives every rank an equal, contiguous share of the order, and cuts it into mini-batches; a
    rank's part of a mini-batch is a multiple of the micro-batch. `split` has the rows of each
    update, `lengths` the tokens of each row, by which verl balances an update's ranks. Example:
    updates of rows [0, 2] and [1] on one rank are the order 0, 2, 1, -1 in mini-batches of 2.
    """
    multiple = ranks * micro_batch
    size = math.ceil(max(map(len, split)) / multiple) * multiple
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for part in split:
        rows = [*part.tolist(), *[-1] * (size - len(part))]
        work = calculate_workload(torch.tensor([lengths[i] if i >= 0 else 2 for i in rows]))
        parts = get_seqlen_balanced_partitions(work.tolist(), ranks, equal_size=True)
        for share, indices in zip(shares, parts, strict=True):
            share += [rows[i] for i in indices]
    return [row for share in shares for row in share], size


def fields_of(rollouts: Sequence[Rollout], order: Sequence[int], end: int) -> list[dict[str, Any]]:
    """Make the fields that verl's actor reads, for the rows of `order`. Padding is two tokens,
    neither of which trains. Raises UsageError if some rollouts have extras that others lack."""
    names = sorted({name for rollout in rollouts for name in rollout.extras})
    if any(len(rollout.extras) < len(names) for rollout in rollouts):
        raise UsageError(
            f"replay in verl: some rollouts were stored without {' or '.join(names)}: "
            "keep use_kl_loss and rollout_correction as they were when the run began"
        )
    token, zero = np.array([end], np.int32), np.zeros(1, np.float32)
    padding = replace(
        rollouts[0], prompt_token_ids=token, completion_token_ids=token, behavior_logprobs=zero,
        completion_mask=zero > 0, extras=dict.fromkeys(names, zero),
    )  # fmt: skip
    return [_fields(rollouts[row] if row >= 0 else padding, row) for row in order]


def _fields(rollout: Rollout, row: int) -> dict[str, Any]:
    """Make the tensors of one rollout that verl's actor reads; `row` is -1 for padding."""
    prompt_P = torch.tensor(rollout.prompt_token_ids, dtype=torch.int64)
    tokens_T = torch.tensor(rollout.completion_token_ids, dtype=torch.int64)
    mask = rollout.completion_mask
    mask_T = torch.ones_like(tokens_T) if mask is None else torch.tensor(mask, dtype=torch.int64)
    return {
        "prompts": prompt_P, "responses": tokens_T, "response_mask": mask_T, "loss_mask": mask_T,
        "input_ids": torch.cat([prompt_P, tokens_T]),
        "position_ids": torch.arange(len(prompt_P) + len(tokens_T)),
        "old_log_probs": torch.tensor(rollout.behavior_logprobs),
        "advantages": (rollout.advantage or 0.0) * mask_T.float(),
        **{name: torch.tensor(values) for name, values in rollout.extras.items()},
        ROW: torch.tensor([row]),
    }  # fmt: skip


def loss_with_outcomes(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """Compute verl's loss of a micro-batch; the outcomes of composed rows go to the metrics."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if ROW in data:
        logprobs, entropy = model_output["log_probs"], model_output.get("entropy", None)
        outcomes = row_outcomes(config, logprobs, data, entropy)
        metrics[OUTCOMES] = [(row, *astuple(outcome)) for row, outcome in outcomes.items()]
    return loss, metrics


def row_outcomes(
    config: Any, logprobs: Any, data: Any, entropy: Any = None
) -> dict[int, RolloutOutcome]:
    """Compute the outcomes of composed rows, without padding, from `logprobs`, the nested tensor
    [P + T] of verl's forward pass."""
    padded = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
    behavior_BT, logprobs_BT = padded["old_log_probs"], no_padding_2_padding(logprobs, data)
    log_ratio_BT = logprobs_BT.detach() - behavior_BT
    return outcomes_of(
        torch.cat(data[ROW].unbind()).tolist(), behavior_BT, padded["response_mask"],
        logprobs_BT, _clipped(config, log_ratio_BT, padded["advantages"]),
        None if entropy is None else no_padding_2_padding(entropy, data),
    )  # fmt: skip


def _clipped(config: Any, log_ratio_BT: torch.Tensor, advantages_BT: torch.Tensor) -> Any:
    """Mark tokens without gradient in verl's clipped loss; None for other losses."""
    if config.policy_loss.get("loss_mode", "vanilla") != "vanilla":
        return None
    low, high = clip_range(config)
    ratio_BT = log_ratio_BT.exp()
    outside_BT = (ratio_BT < 1 - low) | (ratio_BT > config.clip_ratio_c)
    return torch.where(advantages_BT > 0, ratio_BT > 1 + high, outside_BT & (advantages_BT < 0))


def clip_range(actor: Any) -> list[float]:
    """Returns the clip range, ε and ε_high, of verl's actor."""
    bounds = (actor.clip_ratio_low, actor.clip_ratio_high)
    return [actor.clip_ratio if bound is None else bound for bound in bounds]


def outcomes_by_row(values: Any) -> dict[int, RolloutOutcome]:
    """Read the outcomes of all micro-batches and ranks, which verl joins to lists of numbers."""
    rows = np.array(values, np.float64).reshape(-1, 1 + len(RolloutOutcome.__slots__))
    return {int(row): RolloutOutcome(int(tokens), *rest) for row, tokens, *rest in rows.tolist()}
