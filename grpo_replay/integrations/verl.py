"""Replay in verl 0.9.1's V1 trainers.

    python -m grpo_replay.integrations.verl WORDS trainer.v1.trainer_mode=replay \\
        +trainer.v1.replay.preset=ours +trainer.v1.replay.ratio=0.5

in place of `python -m verl.trainer.main_ppo WORDS`; without the words of replay it is that command.

verl's loss takes a row's importance ratio with respect to its `old_log_probs`. If these are the
log-probs of the row's birth, it is the off-policy loss of paper A. So only the batch of
`_update_actor` changes: the rows of the step go through the buffer, and what it returns is put into
a partition of TransferQueue of its own. The caller keeps the fresh batch, so that verl's metrics,
dumps and clean-up are of fresh rows. A step of the buffer is a call of `_update_actor`. With preset
`grpo` or ratio 0 every method is verl's.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_teacher_policy
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.device import auto_set_device
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from grpo_replay.errors import GrpoReplayError, UsageError
from grpo_replay.integrations.host import HostRun, HostStep, HostWords, replay_settings
from grpo_replay.integrations.verl_rows import (
    EXTRAS,
    NEEDED,
    OUTCOMES,
    SAMPLER,
    fields_of,
    groups_of,
    layout,
    loss_with_outcomes,
    outcomes_by_row,
)
from grpo_replay.recipe import ReplayConfig
from grpo_replay.types import RolloutOutcome

TESTED = ("0.9.1",)
MODE = "replay"
"""`trainer.v1.trainer_mode`, the section of the settings, and the partition of composed batches."""
HOSTS = {
    "sync": PPOTrainerSync,
    "colocate_async": PPOTrainerColocateAsync,
    "separate_async": PPOTrainerSeparateAsync,
}
TIMERS = {
    "generation": ("gen",), "reward": ("reward",), "logprob": ("old_log_prob", "ref"),
}  # fmt: skip
"""verl's timers before the update, by stage."""
_Host: Any = object  # a PPOTrainer, for the type checker


# The configuration


def settings_of(config: Any) -> tuple[ReplayConfig, str]:
    """The replay settings of `trainer.v1.replay`, and the mode of verl that it runs in. Raises
    RecipeError and UsageError."""
    given = OmegaConf.to_container(config.trainer.v1.get(MODE) or OmegaConf.create({}))
    assert isinstance(given, dict)
    host_mode = given.pop("host_mode", "sync")
    if host_mode not in HOSTS:
        raise UsageError(
            f"trainer.v1.replay.host_mode {host_mode!r}: expected one of {', '.join(HOSTS)}"
        )
    return replay_settings(given, "trainer.v1.replay"), host_mode


def check(config: Any) -> None:
    """Raises UsageError or RecipeError for what replay cannot do in verl, before Ray starts."""
    settings, host_mode = settings_of(config)
    if problems := list(_problems(config) if settings.replays else _version_problems()):
        raise UsageError("replay in verl: " + "; ".join(problems))
    if settings.replays:
        run = new_run(config, settings)
        run.describe(sections_of(config, host_mode, config.trainer.total_training_steps or 1))
        run.refuse_another_run()


def _version_problems() -> Iterator[str]:
    if (found := version("verl")) not in TESTED:
        yield (
            f"verl {found} is installed, and private methods of verl are overridden: install "
            f"verl=={TESTED[-1]}, the version that this was tested with"
        )


def _problems(config: Any) -> Iterator[str]:
    """Settings of verl under which replay would be wrong, and what to set."""
    yield from _version_problems()
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if not config.trainer.use_v1:
        yield "trainer.use_v1=False is another trainer: set True"
    if need_critic(config) or config.trainer.critic_warmup > 0:
        yield (
            "a critic (critic.enable, algorithm.adv_estimator=gae, trainer.critic_warmup) has "
            "advantages per token: set algorithm.adv_estimator=grpo and critic_warmup=0"
        )
    elif algorithm.adv_estimator != "grpo":
        yield f"algorithm.adv_estimator={algorithm.adv_estimator}: only grpo is supported"
    if algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward makes rewards depend on the policy: set False, and "
            "actor_rollout_ref.actor.use_kl_loss=True"
        )
    if actor.ppo_epochs > 1:
        yield (
            f"actor_rollout_ref.actor.ppo_epochs={actor.ppo_epochs} trains on every batch several "
            "times: set 1 and raise trainer.v1.replay.ratio"
        )
    if need_teacher_policy(config):
        yield "distillation has a teacher's tensors for every row: set distillation.enabled=False"


def _renamed(message: str) -> str:
    names = {
        "loss.epsilon_high": "actor_rollout_ref.actor.clip_ratio_high",
        "loss.epsilon": "actor_rollout_ref.actor.clip_ratio_low",
        "loss.dual_clip": "actor_rollout_ref.actor.clip_ratio_c",
        "sampling.group_size": "actor_rollout_ref.rollout.n",
        "optimizer.learning_rate": "actor_rollout_ref.actor.optim.lr",
        "run.steps": "trainer.total_training_steps",
    }
    for ours, theirs in names.items():
        message = message.replace(ours, theirs)
    return message


WORDS = HostWords(
    settings="verl",
    folder="trainer.default_local_dir",
    resume="trainer.resume_mode=auto",
    group_size="actor_rollout_ref.rollout.n",
    checkpoints="global_step_*",
    one_prompt="let the agent loop put what differs between sessions into the response",
    own_advantages="let the reward function give what changes the advantages after it",
    renamed=_renamed,
)


def new_run(config: Any, settings: ReplayConfig) -> HostRun:
    folder = Path(config.trainer.default_local_dir).absolute()
    group_size = config.actor_rollout_ref.rollout.n
    return HostRun(settings, group_size, config.data.seed or 0, folder, WORDS)


def local_updates(config: Any, host_mode: str) -> int:
    """Calls of `_update_actor` in a step of verl."""
    return config.trainer.v1.get(host_mode, {}).get("parameter_sync_step", 1)


AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
"""verl's `loss_agg_mode` that a recipe has."""


def sections_of(config: Any, host_mode: str, steps: int) -> dict[str, Any]:
    """The recipe of a run of `steps` steps of verl, as far as known."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    low, high = (
        actor.clip_ratio if each is None else each
        for each in (actor.clip_ratio_low, actor.clip_ratio_high)
    )
    loss = {
        "epsilon": low, "epsilon_high": high, "dual_clip": actor.clip_ratio_c,
        "beta": actor.kl_loss_coef if actor.use_kl_loss else 0.0,
    }  # fmt: skip
    if aggregation := AGGREGATIONS.get(actor.loss_agg_mode):
        loss["aggregation"] = aggregation
    precision = OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype")
    each = local_updates(config, host_mode)
    return {
        "name": "verl",
        "model": {
            "path": config.actor_rollout_ref.model.path,
            "dtype": "float32" if precision == "fp32" else "bfloat16",
        },
        "batch": {"updates_per_step": 1},
        "loss": loss,
        "sampling": {
            "prompts_per_step": config.data.train_batch_size // each,
            "group_size": rollout.n,
            "temperature": rollout.temperature,
            "max_completion_length": config.data.max_response_length,
        },
        "advantage": {"std": "sample" if config.algorithm.norm_adv_by_std_in_grpo else "none"},
        "optimizer": {"learning_rate": actor.optim.lr},
        "run": {"seed": config.data.seed or 0, "steps": steps * each},
    }  # fmt: skip


# The trainer


class ReplayMixin(_Host):
    """Replay for a trainer of verl; it stands first: `class Mine(ReplayMixin, PPOTrainerSync)`.
    Settings are those of `trainer.v1.replay`."""

    def __init__(self, config: Any) -> None:
        self.replay, self._host_mode = settings_of(config)
        config.trainer.v1.trainer_mode = self._host_mode  # verl asks in many places if it is "sync"
        super().__init__(config)
        self._sizes: dict[str, Any] = {}  # of the composed batch
        self._outcomes: dict[int, RolloutOutcome] = {}
        self._timed: dict[str, float] = {}  # of this step of verl, in earlier local updates
        self._sync_seconds = 0.0
        self._ended = time.perf_counter()  # the last step of the buffer

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.replay.replays and self.processor is not None:
            raise UsageError(
                f"replay in verl: {self.config.actor_rollout_ref.model.path} reads images, which "
                "are not stored: take a model of text"
            )

    def _setup(self) -> None:
        super()._setup()
        if not self.replay.replays:
            return
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        self.actor_rollout_wg.set_loss_fn(partial(loss_with_outcomes, actor))
        update = self.actor_rollout_wg.update_actor
        self.actor_rollout_wg.update_actor = lambda batch: self._with_own_sizes(update, batch)

    def _with_own_sizes(self, update: Any, batch: Any) -> Any:
        """verl takes the sizes of its configuration just before this call."""
        batch.extra_info.update(self._sizes)
        metrics = update(batch)["metrics"]
        self._outcomes = outcomes_by_row(metrics.pop(OUTCOMES))
        return {"metrics": metrics}

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self.replay.replays:
            return super()._update_actor(batch, metrics)
        seconds = self._seconds_before()
        step = self.run.step(self._groups(batch))
        began = time.perf_counter()
        if step.rollouts:
            self._train(step, batch, metrics)
        seconds["training"] = time.perf_counter() - began
        self._record(step, seconds, metrics)
        return batch

    def _groups(self, batch: Any) -> Any:
        real = [
            key for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding")
        ]  # fmt: skip
        fields = [*NEEDED, *EXTRAS, SAMPLER]
        data = tq.kv_batch_get(real, batch.partition_id, select_fields=fields)  # those that exist
        decode, end = self.tokenizer.decode, self.tokenizer.eos_token_id
        return groups_of(real, data, self.config.actor_rollout_ref.rollout.n, decode, end)

    def _train(self, step: HostStep, batch: Any, metrics: dict[str, Any]) -> None:
        """verl's update with the rows of the step, in as many mini-batches as without replay."""
        actor, config = self.config.actor_rollout_ref.actor, self.config
        prompts = config.data.train_batch_size // self.parameter_sync_step
        split = self.run.buffer.split(step.batch, -(-prompts // actor.ppo_mini_batch_size))
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        micro_batch = 1 if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
        rollouts = step.rollouts
        lengths = [len(each.prompt_token_ids) + len(each.completion_token_ids) for each in rollouts]
        order, size = layout(split, lengths, ranks, micro_batch)
        rows = fields_of(rollouts, order, self.tokenizer.eos_token_id)
        self._sizes = {
            "mini_batch_size": size,
            "global_batch_size": len(rollouts) / len(split),  # every row has one weight, padding 0
            "dataloader_kwargs": {"shuffle": False},  # the split is random
        }
        version = {f"{name}global_steps": self.global_steps for name in ("", "min_", "max_")}
        tags = [{"status": "success", "seq_len": len(row["input_ids"]), **version} for row in rows]
        keys = [f"{step.number}_{i}_0" for i in range(len(rows))]
        fields = list_of_dict_to_tensordict(rows)
        tq.kv_batch_put(keys=keys, partition_id=MODE, fields=fields, tags=tags)
        try:
            extra_info = dict(batch.extra_info)
            composed = tq.KVBatchMeta(
                partition_id=MODE, keys=keys, tags=tags, extra_info=extra_info
            )
            super()._update_actor(composed, metrics)
        finally:
            tq.kv_clear(keys=keys, partition_id=MODE)

    # Files and metrics

    def on_step_end(self) -> None:
        super().on_step_end()
        self._timed.clear()
        self._sync_seconds = self.timing_raw.get("update_weights", 0.0)

    def _seconds_before(self) -> dict[str, float]:
        """By stage, since the last step of the buffer. Where sampling runs ahead, the time that is
        waited for it is not that of generating."""
        spent = {"sync": self._sync_seconds}
        for stage, names in TIMERS.items():
            now = sum(self.timing_raw.get(name, 0.0) for name in names)
            spent[stage] = now - self._timed.get(stage, 0.0)
            self._timed[stage] = now
        self._sync_seconds = 0.0
        if self._host_mode != "sync":
            del spent["generation"]
        return spent

    def _record(self, step: HostStep, seconds: dict[str, float], metrics: dict[str, Any]) -> None:
        now = time.perf_counter()
        whole, self._ended = now - self._ended, now
        seconds |= {"step": whole, "other": max(0.0, whole - sum(seconds.values()))}
        found = self.run.record(step, self._outcomes if step.rollouts else {}, seconds)
        metrics.update({name: value for name, value in found.items() if value is not None})

    def _save_checkpoint(self) -> None:
        if self.replay.replays:  # before verl's, which names the checkpoint as the newest
            self.run.save(Path(self.run.folder, f"global_step_{self.global_steps}"))
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.replay.replays:
            return
        self.run = new_run(self.config, self.replay)
        self.run.describe(sections_of(self.config, self._host_mode, self.total_training_steps))
        if self.global_steps:
            checkpoint = Path(self.run.folder, f"global_step_{self.global_steps}")
            if self.config.trainer.resume_mode == "resume_path":
                checkpoint = Path(self.config.trainer.resume_from_path).absolute()
            self.run.load(checkpoint, dict(self._extras()))
        self.run.open()
        self._ended = time.perf_counter()

    def _extras(self) -> Iterator[tuple[str, str]]:
        """What fresh rollouts have stored, and what to set without it."""
        if self.use_reference_policy:
            yield "ref_log_prob", "actor_rollout_ref.actor.use_kl_loss=False"
        correction = self.config.algorithm.get("rollout_correction") or {}
        if correction.get("rollout_is") and not correction.get("bypass_mode"):
            yield "rollout_is_weights", "algorithm.rollout_correction.rollout_is=null"


# The command


class Runner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's task runner, in a process of Ray, with the trainer above."""

    def run(self, config: Any) -> None:
        host = HOSTS[settings_of(config)[1]]
        register_trainer(MODE)(type(f"Replay{host.__name__}", (ReplayMixin, host), {}))
        super().run(config)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: Any) -> None:
    """What verl.trainer.main_ppo does, with the trainer above if the mode is `replay`."""
    if config.trainer.v1.trainer_mode != MODE and MODE in config.trainer.v1:
        sys.exit(
            f"trainer.v1.replay is set, and trainer.v1.trainer_mode is "
            f"{config.trainer.v1.trainer_mode}: set trainer.v1.trainer_mode=replay"
        )
    auto_set_device(config)
    try:
        check(config)
    except GrpoReplayError as error:
        sys.exit(str(error))
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, ray.remote(Runner))


if __name__ == "__main__":
    # Ray imports the runner by the name of its module, so it may not be that of __main__.
    from grpo_replay.integrations.verl import main as main_of_module

    main_of_module()
