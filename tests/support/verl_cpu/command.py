"""The command line of a run of the tiny task."""

import os
import sys
from pathlib import Path

import grpo_replay
from verl_cpu import task

HERE = Path(__file__).resolve().parent
BASE = Path(grpo_replay.__file__).parent / "tiny" / "base"
PLAIN, REPLAY = "verl.trainer.main_ppo", "grpo_replay.integrations.verl"
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))


def words(folder: Path, ranks: int = 1) -> list[str]:
    """Four steps of eight prompts with eight completions, in two updates each."""
    return [
        f"trainer.n_gpus_per_node={ranks}", "trainer.nnodes=1", "trainer.device=cpu",
        f"+ray_kwargs.ray_init.num_gpus={ranks + 1}", "ray_kwargs.ray_init.num_cpus=40",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=8", "data.max_prompt_length=16", "data.max_response_length=20",
        "data.dataloader_num_workers=0", "data.seed=1",
        f"{MODEL}.path={BASE}", f"+{MODEL}.override_config.attn_implementation=sdpa",
        f"{MODEL}.use_remove_padding=False", f"{MODEL}.enable_gradient_checkpointing=False",
        f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.fsdp_config.model_dtype=fp32",
        f"{ACTOR}.fsdp_config.use_torch_compile=False",
        f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=4096",
        f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.use_kl_loss=False",
        f"{ACTOR}.optim.lr=1e-4", f"{ACTOR}.clip_ratio_high=0.28",
        f"{ROLLOUT}.name=hf_cpu", f"{ROLLOUT}.n=8", f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.free_cache_engine=False",
        f"{ROLLOUT}.load_format=auto", f"{ROLLOUT}.agent.num_workers=1",
        "algorithm.adv_estimator=grpo", "reward.num_workers=1",
        f"reward.custom_reward_function.path={task.__file__}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.logger=[console,file]", "trainer.val_before_train=False", "trainer.test_freq=-1",
        "trainer.total_training_steps=4", "trainer.total_epochs=1000", "trainer.save_freq=1",
        f"trainer.default_local_dir={folder}/run", "trainer.project_name=tiny",
        "trainer.experiment_name=tiny", f"hydra.run.dir={folder}/hydra",
    ]  # fmt: skip


def command(folder: Path, *more: str, module: str = REPLAY, ranks: int = 1) -> list[str]:
    """`folder` gets the problems, verl's metrics in metrics.jsonl, and the run in run/."""
    folder.mkdir(parents=True, exist_ok=True)
    task.write_problems(folder)
    return [sys.executable, "-m", module, *words(folder, ranks), *more]


def environment(folder: Path, *modules: str) -> dict[str, str]:
    """`modules` are imported by each of verl's processes, next to the stand-ins."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0",
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_CPU_RUN": str(os.getpid()),
        "VERL_USE_EXTERNAL_MODULES": ",".join(["verl_cpu.stand_ins", *modules]),
        "VERL_LOGGING_LEVEL": "WARNING", "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
