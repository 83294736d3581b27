"""What every scenario reads, made once and given to both commits: small models with random weights,
a tokenizer, problems, reward functions and a script for TRL. Nothing here comes from a commit."""

import json
from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789+-*=,;() "]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
    "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    "rms_norm_eps": 1e-6,
}  # fmt: skip
MODELS = {"qwen3": {"tie_word_embeddings": True}, "llama": {"tie_word_embeddings": False}}

REWARDS = """
import hashlib
from pathlib import Path

def score(completion, answer, row):
    if "marks" in row:
        with open(Path(row["marks"]) / row["id"], "a") as file:
            file.write("1\\n")
    bits = hashlib.sha256(f"{answer} {completion}".encode()).digest()
    return 1.0 if bits[0] % 3 == 0 else -1.0
"""
"""Scores that depend on the text alone. If the problem names a folder for marks, each call leaves
one, by which the scripted server knows that the completion has reached the verifiers."""

TRL_SCRIPT = '''
"""TRL's trainer with replay: trl_run.py MODEL PROBLEMS OUTPUT."""
import hashlib, json, sys
from pathlib import Path
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig
from grpo_replay import ReplayConfig
from grpo_replay.integrations.trl import ReplayGRPOTrainer

torch.set_num_threads(1)
model, problems, output = sys.argv[1:]
rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
data = Dataset.from_list([{"prompt": r["problem"] + "=", "answer": r["answer"]} for r in rows])
def reward(completions, answer, **_):
    digests = [hashlib.sha256(f"{a} {c}".encode()).digest() for a, c in zip(answer, completions)]
    return [1.0 if digest[0] % 3 == 0 else -1.0 for digest in digests]
config = GRPOConfig(
    output_dir=output, use_cpu=True, bf16=False, report_to=[], seed=1, logging_steps=1,
    disable_tqdm=True, max_steps=8, save_strategy="steps", save_steps=4,
    gradient_checkpointing=False, per_device_train_batch_size=16, gradient_accumulation_steps=1,
    steps_per_generation=2, num_generations=8, max_completion_length=10, beta=0.0,
    loss_type="dapo", learning_rate=1e-3, lr_scheduler_type="constant",
    model_init_kwargs={"dtype": "float32"})
replay = ReplayConfig(preset="ours", max_age_steps=2, warmup_steps=1)
trainer = ReplayGRPOTrainer(model, reward, config, data, replay=replay,
                            processing_class=AutoTokenizer.from_pretrained(model))
trainer.train()
history = [{k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k
            and "time" not in k} for row in trainer.state.log_history]
(Path(output) / "history.json").write_text(json.dumps(history))
'''


def make_inputs(folder: Path) -> Path:
    """The folder, with everything in it."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, changes in MODELS.items():
        _make_model(folder / kind, kind, changes)
    sums = [(n + 3, n * 7 % 50) for n in range(54)]
    problems = [
        {"id": f"p{n}", "problem": f"{a}+{b}", "answer": str(a + b)}
        for n, (a, b) in enumerate(sums)
    ]
    _write_lines(folder / "problems.jsonl", problems[:48])
    _write_lines(folder / "held_out.jsonl", problems[48:])
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "trl_run.py").write_text(TRL_SCRIPT)
    return folder


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_model(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, logging

    logging.disable_progress_bar()

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **SIZES | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def with_marks(problems: Path, marks: Path) -> Path:
    """These problems, each of which names the folder `marks`, in a file beside that."""
    marks.mkdir(parents=True)
    rows = map(json.loads, problems.read_text().splitlines())
    _write_lines(marks.with_suffix(".jsonl"), [row | {"marks": str(marks)} for row in rows])
    return marks.with_suffix(".jsonl")


def base_recipe(inputs: Path, evaluates: bool) -> dict[str, Any]:
    """A few seconds: five steps of 16 rollouts, with replay from the third on; and evaluations of
    the held-out problems at the start and at the end. The model is a folder of the inputs."""
    score = f"{inputs / 'rewards.py'}:score"
    held_out = {
        "benchmarks": [str(inputs / "held_out.jsonl")], "samples": 2, "temperature": 0.9,
        "top_p": 0.9, "greedy": True, "reward": score,
    }  # fmt: skip
    return {
        "model": {"path": "qwen3"},
        "prompts": {
            "source": str(inputs / "problems.jsonl"), "id_field": "id", "template": "plain",
            "user_template": "{problem}=", "max_prompt_length": 64,
        },
        "sampling": {"prompts_per_step": 4, "group_size": 4, "max_completion_length": 10},
        "reward": {"function": score, "workers": 1},
        "replay": {"preset": "ours", "ratio": 1.0, "max_age_steps": 3, "warmup_steps": 2},
        "batch": {"updates_per_step": 2, "max_tokens_per_microbatch": 200},
        "optimizer": {"learning_rate": 1e-3},
        "engine": {"device": "cpu", "threads_per_process": 1},
        "run": {"steps": 5, "seed": 5},
        "checkpoint": {"every_steps": 2},
        "eval": held_out if evaluates else {},
        "tracking": {"report_to": []},
    }  # fmt: skip
