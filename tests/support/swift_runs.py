"""Short runs of ms-swift on the tiny model: as the command `swift rlhf`, or in this process."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outside_ranks import environment

import grpo_replay
from grpo_replay.integrations.swift_plugin import PLUGIN
from grpo_replay.tiny.problems import train_problems

BASE = Path(grpo_replay.__file__).parent / "tiny" / "base"
TASK = Path(__file__).parent / "swift_task" / "tiny_swift_task.py"
UPDATES = 2
"""Of a generation batch: 32 rollouts, four prompts of eight."""

OURS = {"preset": "ours", "warmup_steps": 1, "max_age_steps": 3}
FRESH = {"preset": "ours", "warmup_steps": 5, "drop_zero_variance": False}
"""Five steps in which fresh rows pass the buffer, all of them, and one with replay."""
TURNS = {"multi_turn_scheduler": "again", "max_turns": 2}
LORA = {"tuner_type": "lora", "target_modules": "all-linear", "lora_dropout": 0,
        "learning_rate": 1e-3, "beta": 0.05}  # fmt: skip


def write_problems(path: Path) -> Path:
    if not path.exists():
        rows = [
            {
                "messages": [{"role": "user", "content": each["problem"]}],
                "answer": str(each["answer"]),
            }
            for each in train_problems(seed=1)
        ]
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def words(folder: Path, plugins: tuple[Path | str, ...], changes: Mapping[str, Any]) -> list[str]:
    """The arguments of `swift rlhf` for a run of 12 updates, six generation batches, in `folder`.
    A change of None leaves a flag out."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    flags = {
        "rlhf_type": "grpo", "model": BASE, "model_type": "qwen3", "template": "tiny",
        "external_plugins": [*plugins, TASK], "reward_funcs": "tiny",
        "dataset": write_problems(folder.parent / "problems.jsonl"), "tuner_type": "full",
        "torch_dtype": "float32", "fp16": "false", "attn_impl": "sdpa", "use_cpu": "true",
        "num_generations": 8, "max_completion_length": 20, "max_length": 100,
        "per_device_train_batch_size": 16, "steps_per_generation": UPDATES,
        "gradient_accumulation_steps": 1, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "warmup_ratio": 0, "weight_decay": 0,
        "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 10, "beta": 0,
        "max_steps": 6 * UPDATES, "logging_steps": 1, "save_steps": 10, "output_dir": folder,
        "add_version": "false", "report_to": "none", "gradient_checkpointing": "false",
        "split_dataset_ratio": 0, "dataset_num_proc": 1, "seed": 0, "use_hf": "true",
        "use_vllm": "false", "log_completions": "false", "dataloader_num_workers": 0,
        "check_model": "false",
    }  # fmt: skip
    given = {name: value for name, value in (flags | dict(changes)).items() if value is not None}
    found: list[str] = []
    for name, value in given.items():
        found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def rlhf(
    folder: Path, replay: Mapping[str, Any] | str | None, processes: int = 1, kill: int = 0,
    **changes: Any,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """The command, with the plugin and `replay` in GRPO_REPLAY, or as in plain ms-swift (None)."""
    settings = {} if replay is None else {"GRPO_REPLAY": as_text(replay)}
    ranks = {"NPROC_PER_NODE": str(processes), "MASTER_PORT": str(29500 + os.getpid() % 2000)}
    done = subprocess.run(
        [Path(sys.executable).with_name("swift"), "rlhf",
         *words(folder, () if replay is None else (PLUGIN,), changes)],
        env=environment() | settings | (ranks if processes > 1 else {})
        | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TINY_SWIFT_KILL": str(kill)},
        capture_output=True, text=True,
    )  # fmt: skip
    return done


def as_text(replay: Mapping[str, Any] | str) -> str:
    return replay if isinstance(replay, str) else json.dumps(dict(replay))


def weights_of(checkpoint: Path) -> str:
    """SHA-256 of the weights of a checkpoint, or of its adapters."""
    files = [*checkpoint.glob("model*.safetensors"), *checkpoint.glob("adapter*.safetensors")]
    assert len(files) == 1, f"{checkpoint}: {files}"
    return hashlib.sha256(files[0].read_bytes()).hexdigest()


def in_this_process(
    folder: Path, replay: Mapping[str, Any] | None, kind: Any = None, **changes: Any
):
    """The trainer of a run with ms-swift's own trainer, with ours (`replay`), or with `kind`."""
    import swift.trainers
    from swift.pipelines import rlhf_main
    from swift.rlhf_trainers import GRPOTrainer

    from grpo_replay.integrations.swift import VARIABLE, ReplayGRPOTrainer

    default = GRPOTrainer if replay is None else ReplayGRPOTrainer
    made: list[Any] = []

    class Kept(kind or default):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append(self)
            super().__init__(*args, **kwargs)

    global Trainer  # where ms-swift looks it up
    Trainer = Kept
    mapping = swift.trainers.TrainerFactory.TRAINER_MAPPING
    before, os.environ[VARIABLE] = mapping["grpo"], as_text(replay or {})
    mapping["grpo"] = f"{__name__}.Trainer"
    try:
        rlhf_main(words(folder, (), changes))
    finally:
        mapping["grpo"] = before
        del os.environ[VARIABLE]
    return made[0]
