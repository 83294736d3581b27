"""Short runs of TRL on the tiny model. As a script, one rank of two: trl_runs.py FOLDER PRESET."""

import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import grpo_replay
from grpo_replay import ReplayConfig
from grpo_replay.integrations.trl import ReplayGRPOTrainer
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.tiny.problems import PROMPT_TEMPLATE, train_problems
from grpo_replay.training.metrics import depends_on_time

BASE = Path(grpo_replay.__file__).parent / "tiny" / "base"
PRESETS = {
    "ours": {"max_age_steps": 2, "warmup_steps": 1},
    "uniform": {"max_age_steps": 2, "warmup_steps": 1},
    "group_std": {"max_age_steps": 2, "warmup_steps": 1},
    "fifo": {"capacity_rollouts": 64},
}
UPDATES = 2


def preset(name: str) -> ReplayConfig:
    return ReplayConfig.of(name, **PRESETS[name])


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    boxes = [text.rpartition("\\boxed{")[2].partition("}")[0] for text in completions]
    return [1.0 if box == gold else -1.0 for box, gold in zip(boxes, answer, strict=True)]


def make(folder: Path, replay: ReplayConfig | None, kind: Any = ReplayGRPOTrainer, **changes: Any):
    """A trainer of 4 steps: 4 prompts of 8 completions each, two updates."""
    torch.set_num_threads(1)
    rows = [
        {"prompt": PROMPT_TEMPLATE.format(problem=row["problem"]), "answer": str(row["answer"])}
        for row in train_problems(1)
    ]
    settings = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": [], "seed": 1,
        "logging_steps": 1, "disable_tqdm": True, "max_steps": 4 * UPDATES, "save_strategy": "no",
        "gradient_checkpointing": False, "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1, "steps_per_generation": UPDATES, "num_generations": 8,
        "max_completion_length": 20, "beta": 0.0, "loss_type": "dapo", "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    extra = {} if kind is GRPOTrainer else {"replay": replay}
    trainer = kind(
        str(BASE), reward, GRPOConfig(**settings | changes), Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(BASE), **extra,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


class StopsAtReplay(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        control.should_training_stop |= (logs or {}).get("replay/rollouts", 0) > 0


def weights_of(trainer: Any) -> str:
    model = trainer.accelerator.unwrap_model(trainer.model)
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def metrics(folder: Path, timed: bool = True) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if timed or not depends_on_time(k)} for line in lines]


def logged(folder: Path, kind: str = "rollouts") -> list[dict[str, Any]]:
    files = sorted((folder / kind).glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def failures(folder: Path) -> list[str]:
    """What --verify finds wrong."""
    return [check.detail for check in verify_run(folder).checks if not check.passed]


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    # Generation and updates are aligned: TRL has no log-probs of birth.
    aligned = {"gradient_accumulation_steps": UPDATES, "max_steps": 4}
    trainer = make(folder, preset(name), per_device_train_batch_size=8, **aligned)
    if "stop" in sys.argv:
        trainer.add_callback(StopsAtReplay())
    if "nan" in sys.argv:  # log-probs that the buffer refuses
        trainer._logprobs = lambda output: output["completion_ids"] * torch.nan
    trainer.train()
    rank = trainer.accelerator.process_index
    (folder / f"weights_{rank}").write_text(weights_of(trainer))
    torch.distributed.destroy_process_group()  # its threads may abort an interpreter that exits


if __name__ == "__main__":
    main()
    gc.collect()  # the trainer, which holds the group's threads
