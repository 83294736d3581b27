"""Part i: verl with its vLLM replica, ten steps with replay and ten without. On a CPU verl's
stand-ins of the tests take the place of card and replica, and the tiny model that of SmolLM2."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_parts.colocated import REPLAY, check_replay
from gpu_parts.models import Task, task_named
from gpu_parts.record import Context
from gpu_parts.sizes import GROUP, UPDATES

MODULE = "grpo_replay.integrations.verl"
STEPS = 10
SUPPORT = Path(__file__).resolve().parents[2] / "tests" / "support"
ARMS = {
    "grpo": [],
    "ours": [f"+trainer.v1.replay.{name}={value}" for name, value in REPLAY.items()],
}
SHOWN = {
    "seconds": "timing_s/step", "generation": "timing_s/gen", "logprob": "timing_s/old_log_prob",
    "update": "timing_s/update_actor", "sync": "timing_s/update_weights",
    "reward": "critic/rewards/mean", "gap": "training/rollout_probs_diff_mean",
    "trained": "cost/trained_rollouts", "replayed": "replay/rollouts",
    "clipped": "replay/clip_fraction", "loss": "actor/pg_loss", "norm": "actor/grad_norm",
}  # fmt: skip
"""Columns of a step in verl's log."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    from grpo_replay.tiny.text_problems import last_number

    return last_number(solution_str, ground_truth)


def measure(context: Context) -> None:
    for preset, words in ARMS.items():
        folder = context.work / f"verl-{preset}"
        mode = ["trainer.v1.trainer_mode=replay", f"+trainer.v1.replay.preset={preset}", *words]
        train(context, folder, [*mode, f"trainer.total_training_steps={STEPS}"])
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line)["data"] for line in lines]
        rows = [{name: row.get(key) for name, key in SHOWN.items()} for row in logged]
        context.record.table(f"steps, {preset}", rows)
        context.record.check(f"{STEPS} steps, {preset}", len(rows) == STEPS, len(rows))
        if preset == "ours":
            check_replay(context, rows)


def train(context: Context, folder: Path, more: list[str]) -> None:
    """What verl says goes where this process's output goes."""
    folder.mkdir(parents=True, exist_ok=True)
    if context.on_gpu:
        command = [sys.executable, "-m", MODULE, *words_on_gpu(context, folder)]
        variables = {**os.environ, "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    else:
        sys.path.insert(0, str(SUPPORT))
        from verl_cpu.command import command as words_of
        from verl_cpu.command import environment

        command, variables = words_of(folder), environment(folder)
        variables.pop("CUDA_VISIBLE_DEVICES", None)  # empty, it contradicts Ray's numbers
    subprocess.run([*command, *more], env=variables, check=True)


def words_on_gpu(context: Context, folder: Path) -> list[str]:
    task = task_named(context, "smollm2")
    write_problems(task, folder)
    actor, rollout, model = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
    return [
        "trainer.n_gpus_per_node=1", "trainer.nnodes=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet",
        f"data.train_batch_size={task.prompts}", f"data.max_prompt_length={task.prompt_tokens}",
        f"data.max_response_length={task.completion_tokens}", "data.dataloader_num_workers=0",
        "+data.apply_chat_template_kwargs.chat_template='{{ messages[0].content }}'",
        f"{model}.path={task.folder}", f"{model}.use_remove_padding=False",
        f"{actor}.strategy=fsdp2", f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=16384", f"{actor}.optim.lr={task.rate}",
        f"{actor}.ppo_mini_batch_size={task.prompts // UPDATES}", f"{actor}.clip_ratio_high=0.28",
        f"{rollout}.name=vllm", f"{rollout}.n={GROUP}", f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.gpu_memory_utilization={context.size.vllm_share}",
        "algorithm.adv_estimator=grpo", f"reward.custom_reward_function.path={__file__}",
        "trainer.logger=[console,file]", "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.save_freq=-1", "trainer.total_epochs=1000", f"hydra.run.dir={folder}/hydra",
        f"trainer.default_local_dir={folder}/run", "trainer.resume_mode=disable",
    ]  # fmt: skip


def write_problems(task: Task, folder: Path) -> None:
    import pandas as pd

    rows = [
        {
            "data_source": task.name,
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": i},
        }
        for i, row in enumerate(task.rows)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
