"""Between verl's rows, tensors in TransferQueue, and rollouts: what a group consists of, how the
rows of a step are laid out for verl's actor, what its update found out about them.

Shapes: B rows of a micro-batch, T longest response in it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
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

NEEDED = ("prompts", "responses", "response_mask", "old_log_probs", "advantages", "rm_scores")
EXTRAS = ("ref_log_prob", "rollout_is_weights")
"""Fields of a row, and those [T] of its birth that verl's loss reads besides, where verl made them.
"""
SAMPLER = "rollout_log_probs"
ROW = "replay_row"
"""The field that says which row of the composed batch a row is; -1 for padding."""
OUTCOMES = "replay_outcomes"
_OUTCOME_VALUES = len(RolloutOutcome.__slots__)


def groups_of(
    keys: Sequence[str], data: Mapping[str, Any], group_size: int, text_of: Callable[[Any], str],
    end: int,
) -> list[list[Row]]:  # fmt: skip
    """The rows `keys` of verl, PROMPT_SESSION_OUTPUT, as groups of completions. `data` has the
    fields as nested tensors, `text_of` decodes tokens, `end` is the token that ends a completion.

    Groups and their rows are in the order of their tokens: verl's is that of arrival. A session of
    which the agent loop returned nothing is a completion without tokens and reward. Raises
    UsageError for an agent loop with several outputs a session, and advantages per token.
    """
    columns = {name: [each.cpu() for each in data[name].unbind()] for name in data.keys()}
    members: dict[str, list[Row]] = {}
    for i, key in enumerate(keys):
        prompt, _, output = key.rsplit("_", 2)
        if output != "0":
            raise UsageError(
                "replay in verl: an agent loop gave several outputs for a session, each with a "
                "prompt of its own, and a group is completions of one prompt: let the loop return "
                "one output, with response_mask 0 for the tokens of tools and users"
            )
        fields = {name: column[i] for name, column in columns.items()}
        members.setdefault(prompt, []).append(_row(fields, text_of, end))
    groups = [sorted(group, key=_tokens) for group in members.values()]
    for group in groups:
        group += [_without_output(group[0])] * (group_size - len(group))
    return sorted(groups, key=lambda group: [_tokens(row) for row in group])


def _tokens(row: Row) -> tuple[list[int], list[int]]:
    return row.prompt_token_ids.tolist(), row.completion_token_ids.tolist()


def _row(fields: Mapping[str, torch.Tensor], text_of: Callable[[Any], str], end: int) -> Row:
    mask_T, tokens_T = fields["response_mask"].bool(), fields["responses"]
    values = fields["advantages"][mask_T]
    if len(values) and not (values == values[0]).all():
        raise UsageError(
            "replay in verl: the tokens of a row have several advantages, and a rollout has one: "
            "use algorithm.adv_estimator=grpo"
        )
    return Row(
        prompt_token_ids=fields["prompts"],
        completion_token_ids=tokens_T,
        completion_text=text_of(tokens_T),
        behavior_logprobs=fields["old_log_probs"],
        sampler_logprobs=fields.get(SAMPLER),
        completion_mask=None if mask_T.all() else mask_T,
        reward=float(fields["rm_scores"].sum()),
        advantage=float(values[0]) if len(values) else 0.0,
        truncated=int(tokens_T[-1]) != end,
        extras={name: fields[name].float() for name in EXTRAS if name in fields},
    )


def _without_output(row: Row) -> Row:
    return Row(row.prompt_token_ids, [], [], reward=None, advantage=0.0)


def layout(
    split: Sequence[np.ndarray], lengths: Sequence[int], ranks: int, micro_batch: int
) -> tuple[list[int], int]:
    """The rows of a step in verl's order, -1 for padding, and the rows of a mini-batch, padding
    included. verl gives each rank an equal share of the order and takes mini-batches from its
    front; a rank's share of a mini-batch is whole micro-batches.

    `split` has the rows of each update, `lengths` the tokens of each row: the ranks of an update
    get as equal work as verl's own balancing makes it. Example: updates of rows [0, 2] and [1] on
    one rank are the order 0, 2, 1, -1 in mini-batches of 2.
    """
    whole = ranks * micro_batch
    size = math.ceil(max(map(len, split)) / whole) * whole
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for part in split:
        rows = [*part.tolist(), *[-1] * (size - len(part))]
        work = calculate_workload(torch.tensor([lengths[i] if i >= 0 else 2 for i in rows]))
        parts = get_seqlen_balanced_partitions(work.tolist(), ranks, equal_size=True)
        for share, own in zip(shares, parts, strict=True):
            share += [rows[i] for i in own]
    return [row for share in shares for row in share], size


def fields_of(
    rollouts: Sequence[Rollout], order: Sequence[int], end: int
) -> list[dict[str, torch.Tensor]]:
    """What verl's actor reads of each row of `order`. Raises UsageError if some of the rollouts
    have extras that others lack."""
    names = {tuple(sorted(rollout.extras)) for rollout in rollouts}
    if len(names) > 1:
        raise UsageError(
            f"replay in verl: rollouts of this step were stored with {' and with '.join(map(str, sorted(names)))}: keep use_kl_loss and "
            "rollout_correction as they were when the run began"
        )
    return [_fields(rollouts[i], i) if i >= 0 else _padding(rollouts[0], end) for i in order]


def _fields(rollout: Rollout, row: int) -> dict[str, torch.Tensor]:
    prompt_P = torch.tensor(rollout.prompt_token_ids, dtype=torch.int64)
    tokens_T = torch.tensor(rollout.completion_token_ids, dtype=torch.int64)
    mask_T = torch.ones_like(tokens_T)
    if rollout.completion_mask is not None:
        mask_T = torch.tensor(rollout.completion_mask, dtype=torch.int64)
    return {
        "prompts": prompt_P,
        "responses": tokens_T,
        "input_ids": torch.cat([prompt_P, tokens_T]),
        "position_ids": torch.arange(len(prompt_P) + len(tokens_T)),
        "response_mask": mask_T,
        "loss_mask": mask_T,
        "old_log_probs": torch.tensor(rollout.behavior_logprobs),
        "advantages": (rollout.advantage or 0.0) * mask_T.float(),
        ROW: torch.tensor([row]),
        **{name: torch.tensor(values) for name, values in rollout.extras.items()},
    }


def _padding(like: Rollout, end: int) -> dict[str, torch.Tensor]:
    """A row of two tokens, none of which trains. verl's own padding is made before log-probs."""
    zero_T, token = torch.zeros(1), torch.tensor([end])
    return {
        "prompts": token,
        "responses": token,
        "input_ids": token.repeat(2),
        "position_ids": torch.arange(2),
        "response_mask": torch.zeros_like(token),
        "loss_mask": torch.zeros_like(token),
        "old_log_probs": zero_T,
        "advantages": zero_T,
        ROW: torch.tensor([-1]),
        **{name: zero_T for name in like.extras},
    }


def loss_with_outcomes(
    config: Any, model_output: Any, data: Any, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's loss of a micro-batch, in a worker. Its metrics get the outcomes of the rows of a
    composed batch, in OUTCOMES, flat."""
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    if ROW in data:
        padded = data.select("response_mask", "old_log_probs", "advantages").to_padded_tensor()
        logprobs_BT = no_padding_2_padding(model_output["log_probs"], data).detach()
        entropy_BT = model_output.get("entropy", None)
        behavior_BT, mask_BT = padded["old_log_probs"], padded["response_mask"].bool()
        found = outcomes_of(
            torch.cat(data[ROW].unbind()).tolist(),
            behavior_BT,
            mask_BT,
            logprobs_BT,
            _clipped(config, logprobs_BT - behavior_BT, padded["advantages"]),
            None if entropy_BT is None else no_padding_2_padding(entropy_BT, data),
        )
        metrics[OUTCOMES] = [(row, *astuple(each)) for row, each in found.items()]
    return loss, metrics


def _clipped(
    config: Any, log_ratio_BT: torch.Tensor, advantages_BT: torch.Tensor
) -> torch.Tensor | None:
    """Where verl's clipped loss has no gradient; None for other losses."""
    mode = config.policy_loss.get("loss_mode", "vanilla")
    if mode != "vanilla":
        return None
    ratio_BT = log_ratio_BT.exp()
    low, high = (
        config.clip_ratio if each is None else each
        for each in (config.clip_ratio_low, config.clip_ratio_high)
    )
    above_BT, below_BT = (
        ratio_BT > 1 + high,
        (ratio_BT < 1 - low) | (ratio_BT > config.clip_ratio_c),
    )
    return torch.where(advantages_BT > 0, above_BT, below_BT & (advantages_BT < 0))


def outcomes_by_row(values: Any) -> dict[int, RolloutOutcome]:
    """The outcomes of all micro-batches, as verl joined them: nested lists of numbers."""
    rows = np.array(values, dtype=np.float64).reshape(-1, 1 + _OUTCOME_VALUES)
    return {int(row): RolloutOutcome(int(tokens), *rest) for row, tokens, *rest in rows.tolist()}
