"""Keys of earlier versions and of other trainers: what they are here.

A recipe that has one is refused, with the new key or the value that holds now. The recipe that an
earlier version saved in a run has all of them: its values are moved, and it is refused only if one
is no longer possible.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_replay.errors import RecipeError

FIXED: Mapping[str, tuple[Any, str]] = {
    "prompts.answer_marker": ("####", ""),
    "prompts.shuffle": (True, ""),
    "prompts.limit": (None, "cut the file, or slice dataset_options.split: 'train[:100]'"),
    "sampling.sync_bucket_mib": (512, ""),
    "sampling.servers.max_retries": (2, ""),
    "sampling.servers.start_timeout_seconds": (600.0, "use request_timeout_seconds"),
    "reward.overlong_weight": (1.0, ""),
    "reward.memory_limit_mib": (2048, ""),
    "replay.priority_epsilon": (1e-6, ""),
    "loss.asymre_delta": (-0.1, "or write a loss of your own (docs/extend.md)"),
    "batch.share_prompts": (True, ""),
    "optimizer.final_fraction": (0.0, ""),
    "engine.hang_report_seconds": (None, "it is a sixth of engine.timeout_seconds"),
    "run.stop_grace_seconds": (None, "it is that of the launcher"),
    "checkpoint.allow_other_reward": (False, "use checkpoint.restore_buffer"),
    "eval.at_end": (True, ""),
    "eval.problem_field": ("problem", "benchmark files share prompts.problem_field"),
    "eval.answer_field": ("answer", "benchmark files share prompts.answer_field"),
    "eval.answer_marker": ("####", ""),
    "eval.id_field": (None, "benchmark files share prompts.id_field"),
    "eval.other_rewards": ([], "grade a report again with eval --regrade"),
    "eval.bootstrap_samples": (2000, ""),
    "tracking.project": ("grpo-replay", "set WANDB_PROJECT or TRACKIO_PROJECT"),
    "tracking.run_name": (None, "the output directory names the run; or set WANDB_NAME"),
    "tracking.samples": (2, ""),
    "tracking.samples_every_steps": (50, ""),
    "tracking.log_rollouts": (True, ""),
}
"""Keys that went: the value that always holds, and what to do for another one."""

MOVED: Mapping[str, str] = {
    "model.lora.rank": "model.lora.r",
    "model.lora.alpha": "model.lora.lora_alpha",
    "model.lora.targets": "model.lora.target_modules",
    "model.lora.dropout": "model.lora.lora_dropout",
    "prompts.config_name": "prompts.dataset_options.name",
    "prompts.revision": "prompts.dataset_options.revision",
    "prompts.split": "prompts.dataset_options.split",
    "sampling.vllm.sleep_mode": "sampling.vllm.enable_sleep_mode",
    "optimizer.epsilon": "optimizer.adamw.eps",
    "optimizer.weight_decay": "optimizer.adamw.weight_decay",
}
"""Keys with another name."""

JOINED: Mapping[str, str] = {
    "model.config_overrides": "model.random_init, as a mapping {num_hidden_layers: 2}",
    "prompts.chat_template_kwargs": "prompts.template, as a mapping {enable_thinking: false}",
    "sampling.servers.host": "sampling.servers.address, host:port",
    "sampling.servers.base_port": "sampling.servers.address, host:port",
    "sampling.servers.sync_folder": "sampling.servers.weight_transfer, the folder's path",
    "reward.weight": "reward.function, a list of {function: …, weight: …}",
    "reward.other_functions": "reward.function, a list of {function: …, weight: …}",
    "advantage.divide_by_std": "advantage.std: none",
    "replay.enabled": "replay.preset: grpo, which never replays",
    "optimizer.beta1": "optimizer.adamw.betas: [0.9, 0.999]",
    "optimizer.beta2": "optimizer.adamw.betas: [0.9, 0.999]",
    "loss.ratio": "loss.kind: gspo for a ratio per rollout",
    "engine.offload_optimizer": "engine.offload: optimizer",
    "engine.offload_parameters": "engine.offload: everything",
}
"""Keys whose values are part of another key's."""


TRL_AND_VERL: Mapping[str, str] = {
    "model.path": "model_name_or_path actor_rollout_ref.model.path",
    "model.dtype": "torch_dtype bf16",
    "model.attn_implementation": "attn_implementation",
    "model.gradient_checkpointing": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "model.lora": "use_peft lora_r peft_config actor_rollout_ref.model.lora_rank",
    "prompts.source": "dataset_name train_dataset data.train_files",
    "prompts.dataset_options": "dataset_config dataset_train_split",
    "prompts.problem_field": "data.prompt_key",
    "prompts.max_prompt_length": "max_prompt_length data.max_prompt_length",
    "prompts.template": "chat_template_kwargs",
    "sampling.backend": "use_vllm vllm_mode actor_rollout_ref.rollout.name",
    "sampling.prompts_per_step": "generation_batch_size data.train_batch_size",
    "sampling.group_size": "num_generations actor_rollout_ref.rollout.n",
    "sampling.max_completion_length": "max_completion_length data.max_response_length",
    "sampling.temperature": "actor_rollout_ref.rollout.temperature",
    "sampling.vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization "
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "sampling.vllm.tensor_parallel_size": "vllm_tensor_parallel_size "
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "reward.function": "reward_funcs reward_weights custom_reward_function",
    "reward.mask_truncated": "mask_truncated_completions",
    "advantage.std": "scale_rewards algorithm.norm_adv_by_std_in_grpo",
    "advantage.estimator": "algorithm.adv_estimator",
    "batch.updates_per_step": "num_iterations steps_per_generation "
    "actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_epochs",
    "batch.max_tokens_per_microbatch": "per_device_train_batch_size gradient_accumulation_steps "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "loss.beta": "beta actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef",
    "loss.epsilon": "epsilon actor_rollout_ref.actor.clip_ratio_low "
    "actor_rollout_ref.actor.clip_ratio",
    "loss.epsilon_high": "epsilon_high actor_rollout_ref.actor.clip_ratio_high",
    "loss.aggregation": "loss_type actor_rollout_ref.actor.loss_agg_mode",
    "loss.sampler_ratio_cap": "vllm_importance_sampling_cap",
    "optimizer.learning_rate": "learning_rate lr actor_rollout_ref.actor.optim.lr",
    "optimizer.schedule": "lr_scheduler_type",
    "optimizer.adamw": "weight_decay adam_beta1 adam_beta2",
    "optimizer.warmup_steps": "warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps",
    "optimizer.max_grad_norm": "max_grad_norm actor_rollout_ref.actor.grad_clip",
    "engine.num_processes": "trainer.n_gpus_per_node",
    "run.steps": "max_steps num_train_epochs trainer.total_training_steps trainer.total_epochs",
    "run.seed": "seed",
    "checkpoint.every_steps": "save_steps trainer.save_freq",
    "checkpoint.keep": "save_total_limit trainer.max_actor_ckpt_to_keep",
    "eval.every_steps": "eval_steps trainer.test_freq",
    "eval.benchmarks": "eval_dataset data.val_files",
    "tracking.report_to": "report_to trainer.logger",
}
"""Our keys, each with what TRL and verl call them (verl's with dots)."""


def what_it_is_here(place: str, value: Any) -> str:
    """For the message about an unknown key `place`, a leaf or a mapping: the keys that stand for
    those of TRL or verl in it; empty if there are none."""
    leaves = list(_leaves(place, value))
    ours = {theirs: key for key, names in TRL_AND_VERL.items() for theirs in names.split()}
    found = {each: ours.get(each) or ours.get(each.rpartition(".")[2]) for each in leaves}
    return ", ".join(f"{theirs} is {key} here" for theirs, key in found.items() if key)


def _leaves(place: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping) or place in {"peft_config", "custom_reward_function"}:
        yield place
        return
    for key, inner in value.items():
        yield from _leaves(f"{place}.{key}", inner)


def is_retired(key: str) -> bool:
    return key in FIXED or key in MOVED or key in JOINED


def what_became_of(key: str) -> str:
    """For the message about a key that is no longer one."""
    if key in FIXED:
        value, advice = FIXED[key]
        now = f"it always is {value!r}" if value is not None else "it is decided for you"
        return f"{key} is no longer a key: {advice or now}; remove it"
    return f"{key} is now {MOVED.get(key) or JOINED[key]}"


def modernised(saved: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The recipe that an earlier version saved, with its values under today's keys. Raises
    RecipeError for values that are no longer possible."""
    recipe = copy.deepcopy(dict(saved))
    for key, (value, _) in FIXED.items():
        found = _pop(recipe, key, value)
        if found != value:
            raise RecipeError(
                f"{source}: {key} {found!r}: {what_became_of(key)}, or continue this run with the "
                "version of grpo-replay that wrote it (environment.json)"
            )
    for key, new in MOVED.items():
        if (found := _pop(recipe, key)) is not None:
            _section(recipe, new)[new.rpartition(".")[2]] = found
    _join(recipe)
    return recipe


def _join(recipe: dict[str, Any]) -> None:
    """Move the values of `JOINED`."""
    prompts, servers = recipe.get("prompts", {}), recipe.get("sampling", {}).get("servers", {})
    reward = recipe.get("reward", {})
    if overrides := _pop(recipe, "model.config_overrides", {}):
        recipe["model"]["random_init"] = overrides
    if _pop(recipe, "loss.ratio") == "sequence":
        recipe["loss"]["kind"] = "gspo"
    if variables := prompts.pop("chat_template_kwargs", None):
        prompts["template"] = variables
    host, port = servers.pop("host", None), servers.pop("base_port", None)
    if host is not None or port is not None:
        servers["address"] = f"{host or '127.0.0.1'}:{port or 8300}"
    if folder := servers.pop("sync_folder", None):
        servers["weight_transfer"] = folder
    weight, others = reward.pop("weight", 1.0), reward.pop("other_functions", [])
    if weight != 1.0 or others:
        first = {"function": reward.get("function", "minerva"), "weight": weight}
        reward["function"] = [first, *others]
    if _pop(recipe, "advantage.divide_by_std", True) is False:
        recipe["advantage"]["std"] = "none"
    if _pop(recipe, "replay.enabled", True) is False:
        recipe["replay"]["preset"] = "grpo"
    beta1, beta2 = _pop(recipe, "optimizer.beta1"), _pop(recipe, "optimizer.beta2")
    if beta1 is not None or beta2 is not None:
        _section(recipe, "optimizer.adamw.betas")["betas"] = [beta1 or 0.9, beta2 or 0.999]
    kept = (_pop(recipe, "engine.offload_optimizer"), _pop(recipe, "engine.offload_parameters"))
    if any(kept):
        recipe["engine"]["offload"] = "everything" if kept[1] else "optimizer"


def _section(recipe: dict[str, Any], key: str) -> dict[str, Any]:
    for part in key.split(".")[:-1]:
        recipe = recipe.setdefault(part, {})
    return recipe


def _pop(recipe: dict[str, Any], key: str, default: Any = None) -> Any:
    node: Any = recipe
    *parents, leaf = key.split(".")
    for part in parents:
        node = node.get(part, {}) if isinstance(node, dict) else {}
    return node.pop(leaf, default) if isinstance(node, dict) else default
