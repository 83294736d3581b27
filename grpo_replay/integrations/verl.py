"""Replay in verl 0.9.1's V1 trainers.

    python -m grpo_replay.integrations.verl WORDS trainer.v1.trainer_mode=replay \\
        +trainer.v1.replay.preset=ours +trainer.v1.replay.ratio=0.5

in place of `python -m verl.trainer.main_ppo WORDS`. With the log-probs of a row's birth as its
`old_log_probs`, verl's loss is the off-policy loss of paper A. So only the batch of `_update_actor`
changes: the buffer takes its rows, and the composed batch that the buffer returns is put into a
separate partition of TransferQueue. The caller keeps the fresh batch, for verl's metrics, dumps and
clean-up. A step of the buffer is a call of `_update_actor`. With preset `grpo` or ratio 0 every
method is verl's.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy, need_teacher_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.device import auto_set_device
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from grpo_replay.errors import GrpoReplayError, UsageError
from grpo_replay.integrations import verl_rows
from grpo_replay.integrations.host import HostRun, HostStep, HostWords, Row, replay_settings
from grpo_replay.recipe import ReplayConfig
from grpo_replay.training.rollout_source import Stopwatch
from grpo_replay.types import Rollout, RolloutOutcome

TESTED = "0.9.1"
MODE = "replay"
"""Name of the trainer mode, of the settings in `trainer.v1`, and of the partition for batches."""
HOST_MODES = ("sync", "colocate_async", "separate_async")
AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
"""`loss.aggregation` of a recipe by verl's `loss_agg_mode`; others have no equivalent."""
TIMERS = {"generation": ["gen"], "reward": ["reward"], "logprob": ["old_log_prob", "ref"]}
"""verl's timers of the stages before the update."""
_Host: Any = object  # a PPOTrainer, for the type checker


def settings_of(config: Any) -> tuple[ReplayConfig, str]:
    """Read `trainer.v1.replay`: settings and host mode. Raises RecipeError and UsageError."""
    keys: Any = OmegaConf.to_container(config.trainer.v1.get(MODE) or OmegaConf.create())
    host_mode = keys.pop("host_mode", "sync")
    if host_mode not in HOST_MODES:
        raise UsageError(f"trainer.v1.replay.host_mode={host_mode}: expected one of {HOST_MODES}")
    return replay_settings(keys, "trainer.v1.replay"), host_mode


def check(config: Any) -> None:
    """Raise UsageError, RecipeError or OutputDirectoryError for what replay cannot do in verl."""
    if (mode := config.trainer.v1.trainer_mode) != MODE:
        raise UsageError(f"trainer.v1.trainer_mode={mode}: set {MODE}, or start verl's main_ppo")
    settings, _ = settings_of(config)
    if problems := list(_problems(config, settings)):
        raise UsageError("replay in verl: " + "; ".join(problems))
    if settings.replays:
        new_run(config, config.trainer.total_training_steps).refuse_another_run()


def _problems(config: Any, settings: ReplayConfig) -> Iterator[str]:
    """Yields the settings of verl under which replay would be wrong, and what to set instead."""
    if (installed := version("verl")) != TESTED:
        yield f"verl {installed} is installed, and private methods differ: install verl=={TESTED}"
    if not config.trainer.use_v1:
        yield "trainer.use_v1=False is another trainer: set True"
    if not settings.replays:
        return
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if need_critic(config) or config.trainer.critic_warmup > 0:
        yield "a critic: set adv_estimator=grpo, critic.enable=False and trainer.critic_warmup=0"
    elif algorithm.adv_estimator != "grpo":
        yield f"algorithm.adv_estimator={algorithm.adv_estimator}: only grpo is supported"
    if algorithm.use_kl_in_reward:
        yield "algorithm.use_kl_in_reward: rewards follow the policy; set actor.use_kl_loss=True"
    if actor.ppo_epochs > 1:
        yield f"actor.ppo_epochs={actor.ppo_epochs}: set 1, and raise trainer.v1.replay.ratio"
    if need_teacher_policy(config):
        yield "distillation needs a teacher's tensors: set distillation.enabled=False"


def _renamed(message: str) -> str:
    message = message.replace("loss.epsilon_high", "actor.clip_ratio_high")
    return message.replace("loss.epsilon", "actor.clip_ratio_low")


WORDS = HostWords(
    settings="verl", folder="trainer.default_local_dir", resume="trainer.resume_mode=auto",
    group_size="actor_rollout_ref.rollout.n", checkpoints="global_step_*",
    one_prompt="let the agent loop put what differs between sessions into the response",
    renamed=_renamed,
)  # fmt: skip


def new_run(config: Any, steps: int | None) -> HostRun:
    """Make the buffer and the files of a run of `steps` steps of verl; None: not known yet."""
    settings, host_mode = settings_of(config)
    folder = Path(config.trainer.default_local_dir).absolute()
    group_size = config.actor_rollout_ref.rollout.n
    run = HostRun(settings, group_size, config.data.seed or 0, folder, WORDS)
    if steps is not None:
        run.describe(sections_of(config, host_mode, steps))
    return run


def sections_of(config: Any, host_mode: str, steps: int) -> dict[str, Any]:
    """Convert verl's configuration to a recipe's sections for `steps` steps, as far as known. In a
    mode with several updates per step, each update is a step of the recipe."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    low, high = verl_rows.clip_range(actor)
    loss = {"epsilon": low, "epsilon_high": high, "dual_clip": actor.clip_ratio_c}
    loss["beta"] = actor.kl_loss_coef if actor.use_kl_loss else 0.0
    if aggregation := AGGREGATIONS.get(actor.loss_agg_mode):
        loss["aggregation"] = aggregation
    precision = OmegaConf.select(actor, "fsdp_config.mixed_precision.param_dtype")
    dtype = "float32" if precision == "fp32" else "bfloat16"
    updates = config.trainer.v1.get(host_mode, {}).get("parameter_sync_step", 1)
    return {
        "name": "verl",
        "model": {"path": config.actor_rollout_ref.model.path, "dtype": dtype},
        "batch": {"updates_per_step": 1},
        "loss": loss,
        "sampling": {
            "prompts_per_step": config.data.train_batch_size // updates, "group_size": rollout.n,
            "max_completion_length": config.data.max_response_length,
            "temperature": rollout.temperature,
        },
        "advantage": {"std": "sample" if config.algorithm.norm_adv_by_std_in_grpo else "none"},
        "optimizer": {"learning_rate": actor.optim.lr},
        "run": {"seed": config.data.seed or 0, "steps": steps * updates},
    }  # fmt: skip


class ReplayMixin(_Host):
    """Adds replay to a trainer of verl; put it first: `class Mine(ReplayMixin, PPOTrainerSync)`."""

    def __init__(self, config: Any) -> None:
        self.replay, self._host_mode = settings_of(config)
        config.trainer.v1.trainer_mode = self._host_mode  # verl often asks whether it is "sync"
        super().__init__(config)
        self._outcomes: dict[int, RolloutOutcome] | None = None
        self._counted: dict[str, float] = {}  # seconds that earlier updates of this step logged
        self._sync_seconds = 0.0

    def _init_tokenizer(self) -> None:
        super()._init_tokenizer()
        if self.replay.replays and self.processor is not None:
            model = self.config.actor_rollout_ref.model.path
            raise UsageError(f"replay in verl: {model} reads images, which are not stored")

    def _setup(self) -> None:
        super()._setup()
        if self.replay.trains_on_draws:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(partial(verl_rows.loss_with_outcomes, actor))
            update = self.actor_rollout_wg.update_actor
            self.actor_rollout_wg.update_actor = partial(self._update_with_sizes, update)

    def _update_with_sizes(self, update: Any, batch: Any) -> Any:
        """Call `update` with the sizes of the composed batch in place of the configured ones."""
        batch.extra_info.update(self._batch_sizes)
        metrics = update(batch)["metrics"]
        self._outcomes = verl_rows.outcomes_by_row(metrics.pop(verl_rows.OUTCOMES))
        return {"metrics": metrics}

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Take the step of the buffer, update on its batch (in shadow on verl's), and log it."""
        if not self.replay.replays:
            return super()._update_actor(batch, metrics)
        self._clock.seconds |= self._stage_seconds()
        self._outcomes, probe = None, {}
        with self._clock.stage("shadow") if self.replay.shadow else nullcontext():
            step = self.run.step(self._groups(batch))
            if step.probed:
                probe = self._score(step.probed)
        with self._clock.stage("training"):
            if self.replay.shadow:
                super()._update_actor(batch, metrics)
            elif step.rollouts:
                self._train(step, batch, metrics)
        seconds = self._clock.read()
        if self._host_mode != "sync":
            del seconds["generation"]  # not known
        self._clock.restart()
        logged = self.run.record(step, self._outcomes, seconds, probe)
        metrics.update({name: value for name, value in logged.items() if value is not None})
        return batch

    def _groups(self, batch: Any) -> list[list[Row]]:
        tagged = zip(batch.keys, batch.tags, strict=True)
        keys = [key for key, tag in tagged if not tag.get("is_padding")]
        data = tq.kv_batch_get(keys, batch.partition_id, select_fields=[*verl_rows.FIELDS])
        rollout = self.config.actor_rollout_ref.rollout
        decode, longest = self.tokenizer.decode, rollout.response_length
        return verl_rows.groups_of(keys, data, rollout.n, decode, longest)

    def _train(self, step: HostStep, batch: Any, metrics: dict[str, Any]) -> None:
        """Run verl's update on the rows of the step, in as many mini-batches as without replay."""
        actor, rollouts = self.config.actor_rollout_ref.actor, step.rollouts
        prompts = self.config.data.train_batch_size // self.parameter_sync_step
        split = self.run.buffer.split(step.batch, -(-prompts // actor.ppo_mini_batch_size))
        micro_batch, info = actor.ppo_micro_batch_size_per_gpu, dict(batch.extra_info)
        with self._composed_batch(rollouts, split, micro_batch, info) as (composed, size):
            self._batch_sizes = {
                "mini_batch_size": size,
                "global_batch_size": len(rollouts) / len(split),  # gives all rows one weight
                "dataloader_kwargs": {"shuffle": False},  # the split is random already
            }
            super()._update_actor(composed, metrics)

    def _score(self, probed: Mapping[int, Rollout]) -> dict[int, RolloutOutcome]:
        """Compute, by index in the draw, the outcomes that drawn rollouts would have in an
        update."""
        config, rollouts = self.config.actor_rollout_ref, [*probed.values()]
        split, info = [np.arange(len(probed))], {"compute_loss": False, "calculate_entropy": False}
        info["temperature"] = config.rollout.temperature
        micro_batch = config.rollout.log_prob_micro_batch_size_per_gpu
        with self._composed_batch(rollouts, split, micro_batch, info) as (composed, _):
            self.actor_rollout_wg.compute_log_prob(composed)
            data = tq.kv_batch_get(composed.keys, MODE)
        outcomes = verl_rows.row_outcomes(config.actor, data["log_probs"], data)
        return {index: outcomes[row] for row, index in enumerate(probed)}

    @contextmanager
    def _composed_batch(
        self, rollouts: Sequence[Rollout], split: Any, micro_batch: int, info: dict[str, Any]
    ) -> Iterator[tuple[Any, int]]:
        """A context in which `rollouts` are in verl's queue, in the order of `layout`. Yields
        verl's batch of them, with `info`, and the mini-batch size."""
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        if self.config.actor_rollout_ref.actor.use_dynamic_bsz:
            micro_batch = 1
        lengths = [len(r.prompt_token_ids) + len(r.completion_token_ids) for r in rollouts]
        order, size = verl_rows.layout(split, lengths, ranks, micro_batch)
        rows = verl_rows.fields_of(rollouts, order, self.tokenizer.eos_token_id)
        # verl's sampler reads the tags of all partitions.
        versions = {f"{name}global_steps": self.global_steps for name in ("", "min_", "max_")}
        tags = [{"status": "success", "seq_len": len(row["input_ids"]), **versions} for row in rows]
        keys = [f"{self.run.buffer.last_step}_{i}_0" for i in range(len(rows))]
        put = {"keys": keys, "partition_id": MODE, "tags": tags}
        tq.kv_batch_put(**put, fields=list_of_dict_to_tensordict(rows))
        try:
            yield tq.KVBatchMeta(**put, extra_info=info), size
        finally:
            tq.kv_clear(keys=keys, partition_id=MODE)

    def on_step_end(self) -> None:
        super().on_step_end()
        self._counted, self._sync_seconds = {}, self.timing_raw.get("update_weights", 0.0)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.replay.replays:
            self.run.print_summary()

    def _stage_seconds(self) -> dict[str, float]:
        """Returns the seconds by stage, before the update, since the buffer's last step."""
        timer_seconds, stages = self.timing_raw.get, set(TIMERS)
        if self._host_mode != "sync":
            stages.remove("generation")  # it runs ahead: what a step waits for is `other`
        logged = {s: sum(timer_seconds(name, 0.0) for name in TIMERS[s]) for s in stages}
        seconds = {stage: logged[stage] - self._counted.get(stage, 0.0) for stage in stages}
        seconds["sync"], self._counted, self._sync_seconds = self._sync_seconds, logged, 0.0
        return seconds

    def _save_checkpoint(self) -> None:
        if self.replay.replays:  # before verl's, which names the checkpoint as the newest
            self.run.save(self.run.folder / f"global_step_{self.global_steps}")
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        """verl's own, called at the start; then opens the run, with the checkpoint's buffer."""
        super()._load_checkpoint()
        if not self.replay.replays:
            return
        trainer, self.run = self.config.trainer, new_run(self.config, self.total_training_steps)
        checkpoint = self.run.folder / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            checkpoint = Path(trainer.resume_from_path).absolute()
        if self.global_steps:
            self.run.load(checkpoint)
        self.run.open()
        self._clock = Stopwatch()


class Runner(TaskRunnerV1.__ray_metadata__.modified_class):
    """verl's task runner, with replay in the trainer; it runs in a process of Ray."""

    def run(self, config: Any) -> None:
        host = get_trainer_cls(settings_of(config)[1])
        register_trainer(MODE)(type(f"Replay{host.__name__}", (ReplayMixin, host), {}))
        super().run(config)


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: Any) -> None:
    """Run verl.trainer.main_ppo with replay; exits with a message for what `check` refuses."""
    auto_set_device(config)
    try:
        check(config)
    except GrpoReplayError as error:
        sys.exit(f"{error}")
    validate_config(config, need_reference_policy(config), need_critic(config))
    run_ppo(config, ray.remote(Runner))


if __name__ == "__main__":
    # Ray imports the runner by the name of its module, which must not be __main__.
    from grpo_replay.integrations.verl import main as run

    run()
