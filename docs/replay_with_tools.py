"""Replay where a model calls a tool over several turns: heed what the tool said.

pip install -e . trl==1.16.0                             # in a clone of the repository
python docs/replay_with_tools.py runs/guess              # minutes on one CPU core
python docs/replay_with_tools.py runs/plain --plain      # the same without replay
grpo-replay inspect-buffer runs/guess --verify

The environment hides a number from 1 to 7. Its answer to a wrong guess is the number: the second
guess finds it if it heeds the first answer. The reward is 1 for who finds it.
The model, of 80,000 parameters, has first been supervised on games of a player who heeds every
answer, then on games of one who heeds every third (from the latter alone it learns to heed none).
Nothing is downloaded. Every tenth step prints rollouts, CPU seconds and the share of games won.
"""

import argparse
import random
import time

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from grpo_replay import ReplayConfig
from grpo_replay.integrations.trl import ReplayGRPOTrainer

LARGEST, GUESSES = 7, 2
WORDS = ["<pad>", "<end>", "<unk>", "<user>", "<assistant>", "<tool>", "<call>", "guess",
         "number", "no", "yes", *map(str, range(1, LARGEST + 1))]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {% if m.tool_calls %}<call> "
    "{% set call = m.tool_calls[0].function %}{{ call.name }} "
    "{% for key, value in call.arguments.items() %}{{ key }} {{ value }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = {"type": "function", "function": {"name": "{name}", "arguments": {"number": "{content}"}}}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {"open_pattern": r"<call>\s*(?P<name>\w+) number", "repeats": True,
                       "close_pattern": r"\s*<end>\s*", "content": "json", "transform": CALL},
        "content": {"close_pattern": r"\s*<end>\s*", "content": "text"},
    },
}  # fmt: skip


class Guess:
    """The environment: its methods are the tools, `get_reward` scores the episode."""

    def reset(self, number: int, **_) -> None:
        """`number` is a column of the dataset: all completions of a group get the same."""
        self.number, self.found = number, False

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: From 1 to 7.

        Returns:
            The answer.
        """
        self.found |= number == self.number
        return answer(number, self.number)

    def get_reward(self) -> float:
        return float(self.found)


def answer(guess: int, number: int) -> str:
    return "yes" if guess == number else f"no {number}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|\w+"), "removed", invert=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unk>",
        padding_side="left", chat_template=TEMPLATE,
    )  # fmt: skip
    tokenizer.response_template = RESPONSE
    return tokenizer


def game(rng: random.Random, heeded: float = 1 / 3) -> str:
    """A game of a player who heeds this share of the answers, as the chat template writes it."""
    number, text = rng.randint(1, LARGEST), "<user> guess <end> "
    for turn in range(GUESSES):
        heeds = turn > 0 and rng.random() < heeded
        guess = number if heeds else rng.randint(1, LARGEST)
        said = answer(guess, number)
        text += f"<assistant> <call> guess number {guess} <end> <tool> {said} <end> "
        if said == "yes":
            break
    return text + "<assistant> <end>"


def make_model(tokenizer: PreTrainedTokenizerFast, steps: int = 400) -> Qwen3ForCausalLM:
    """A small model after supervised training on such games, the same on every call. Only what the
    player says counts in its loss."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=128,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model, rng = Qwen3ForCausalLM(config), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, max(steps, 1))
    for step in range(steps):
        texts = [game(rng, 1.0 if step < steps / 2 else 1 / 3) for _ in range(32)]
        batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="right")
        ids, starts = batch["input_ids"], [WORDS.index(w) for w in ("<assistant>", "<tool>")]
        player, tool = ((ids == start).cumsum(1) for start in starts)
        labels = ids.masked_fill((player <= tool) | (ids == 0), -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


class Curve(TrainerCallback):
    """Prints rollouts, CPU seconds and the share of games won, over the last ten steps."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts, self.rewards, self.began = rollouts, [], time.process_time()

    def on_log(self, args, state, control, logs=None, **_) -> None:
        self.rewards += [logs["reward"]] if "reward" in logs else []
        if len(self.rewards) == 10:
            steps = state.global_step // 2
            print(f"{steps * self.rollouts} rollouts, {time.process_time() - self.began:.0f} s, "
                  f"won {sum(self.rewards) / 10:.3f}", flush=True)  # fmt: skip
            self.rewards.clear()


SETTINGS = {
    "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 2,
    "per_device_train_batch_size": 64, "steps_per_generation": 2, "num_generations": 8,
    "gradient_accumulation_steps": 1, "gradient_checkpointing": False, "delta": 10.0,
    "max_completion_length": 10 * GUESSES - 5, "max_tool_calling_iterations": GUESSES,
    "learning_rate": 3e-4, "lr_scheduler_type": "constant", "save_strategy": "no",
}  # fmt: skip
"""16 numbers a step, 8 games each, in two updates. The answer to the last guess does not fit into
the length, so a game ends there: words that earn nothing cost a guess."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output_dir")
    parser.add_argument("--plain", action="store_true", help="TRL's own trainer, without replay")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    replay = ReplayConfig.of("ours", ratio=1.0, max_age_steps=4, warmup_steps=2)
    rng, prompt = random.Random(given.seed), [{"role": "user", "content": "guess"}]
    rows = [{"prompt": prompt, "number": rng.randint(1, LARGEST)} for _ in range(1600)]
    config = GRPOConfig(
        output_dir=given.output_dir, seed=given.seed, max_steps=2 * given.steps, **SETTINGS
    )
    tokenizer = make_tokenizer()
    trainer = (GRPOTrainer if given.plain else ReplayGRPOTrainer)(
        make_model(tokenizer),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=Guess,
        **({} if given.plain else {"replay": replay}),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Curve(128))
    trainer.train()


if __name__ == "__main__":
    main()
