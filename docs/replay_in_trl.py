"""Replay in TRL's GRPOTrainer, on the tiny task: a minute on one CPU core, nothing to download.

pip install -e . trl==1.16.0              # in a clone of the repository
python docs/replay_in_trl.py              # or another folder than runs/tiny-in-trl
grpo-replay inspect-buffer runs/tiny-in-trl
"""

import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

import grpo_replay
from grpo_replay import ReplayConfig
from grpo_replay.integrations.trl import ReplayGRPOTrainer
from grpo_replay.tiny.problems import PROMPT_TEMPLATE, train_problems

BASE = Path(grpo_replay.__file__).parent / "tiny" / "base"  # 160,000 parameters


def reward(completions: list[str], answer: list[str], **_) -> list[float]:
    boxes = [text.rpartition("\\boxed{")[2].partition("}")[0] for text in completions]
    return [1.0 if box == gold else -1.0 for box, gold in zip(boxes, answer, strict=True)]


def main(output_dir: str = "runs/tiny-in-trl", steps: int = 40) -> None:
    problems = [
        {"prompt": PROMPT_TEMPLATE.format(problem=row["problem"]), "answer": str(row["answer"])}
        for row in train_problems(seed=1)
    ]
    config = GRPOConfig(
        output_dir=output_dir,
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_steps=2 * steps,
        per_device_train_batch_size=64,
        steps_per_generation=2,  # 128 rollouts a step, in two updates
        gradient_accumulation_steps=1,
        num_generations=8,
        max_completion_length=20,
        learning_rate=1e-4,
        delta=10.0,
        lr_scheduler_type="constant",
        model_init_kwargs={"dtype": "float32"},
        logging_steps=20,
        save_steps=40,
    )
    trainer = ReplayGRPOTrainer(
        str(BASE),
        reward,
        config,
        Dataset.from_list(problems),
        processing_class=AutoTokenizer.from_pretrained(BASE),
        replay=ReplayConfig.of("ours", ratio=1.0, max_age_steps=4, warmup_steps=5),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "replay/rollouts" in row]
    print(f"reward {rows[0]['reward']:.2f} to {rows[-1]['reward']:.2f}")
    print(f"{rows[-1]['replay/rollouts']:.0f} rollouts replayed a step, of mean age "
          f"{rows[-1].get('replay/age_mean', 0):.1f}")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:2])
