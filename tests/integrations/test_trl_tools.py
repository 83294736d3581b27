"""Replay of episodes: tools, environments of several turns, a dict of them, a rollout_func. The
game and its small chat model are those of docs/replay_with_tools.py."""

import json
import random
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig
from trl_runs import failures, logged, weights_of

from grpo_replay import ReplayConfig
from grpo_replay.errors import UsageError
from grpo_replay.integrations.trl import ReplayGRPOTrainer

EXAMPLE = Path(__file__).parents[2] / "docs" / "replay_with_tools.py"
sys.path.insert(0, str(EXAMPLE.parent))
import replay_with_tools as game  # noqa: E402
from replay_with_tools import make_model  # noqa: E402

REPLAY = ReplayConfig.of("ours", ratio=1.0, max_age_steps=2, warmup_steps=1)
PROMPT = [{"role": "user", "content": "guess"}]
TOOL, ASSISTANT, END = map(game.WORDS.index, ("<tool>", "<assistant>", "<end>"))


class Watched(ReplayGRPOTrainer):
    """Keeps (birth step, step, gradient at the tokens of the model, at others) of every row."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forward = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return self.forward

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        gradient = torch.autograd.grad(loss, self.forward[0], retain_graph=True)[0].abs()
        mask = inputs["tool_mask"] * inputs["completion_mask"]
        for i, row in enumerate(inputs["replay_row"].tolist()):
            if row >= 0:
                own, others = ((gradient[i] * each[i]).sum().item() for each in (mask, 1 - mask))
                birth = self._batch.rollouts[row].birth_step
                self.seen.append((birth, self.replay_buffer.last_step, own, others))
        return loss


@cache
def weights():
    return make_model(game.make_tokenizer(), steps=120).state_dict()


def supervised(tokenizer):
    """The example's model, trained for less long and once for all tests."""
    kept = weights()
    model = make_model(tokenizer, steps=0)
    model.load_state_dict(kept)
    return model


def make(folder, rows=None, **changes):
    """A trainer of four steps: four numbers, eight games each, in two updates."""
    torch.set_num_threads(1)
    tokenizer = game.make_tokenizer()
    settings = {"output_dir": str(folder), "seed": 1, "max_steps": 8,
                "per_device_train_batch_size": 16, "max_completion_length": 40}  # fmt: skip
    names = [name for name in changes if name in GRPOConfig.__dataclass_fields__]
    settings |= {name: changes.pop(name) for name in names}
    rows = rows or [{"prompt": PROMPT, "number": n % game.LARGEST + 1} for n in range(40)]
    trainer = Watched(
        supervised(tokenizer), args=GRPOConfig(**game.SETTINGS | settings), replay=REPLAY,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **changes,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def check(folder, trainer):
    """No gradient where a tool spoke, fresh or replayed; masks of birth; verify."""
    assert all(others == 0 for *_, others in trainer.seen)
    replayed = [own for birth, step, own, _ in trainer.seen if birth < step]
    assert len(replayed) > 10 and max(replayed) > 0
    for row in logged(folder):
        heard, expected = False, []
        for before, token in pairwise([-1, *row["completion_token_ids"]]):
            heard |= (before, token) == (END, TOOL)  # elsewhere, the model speaks for the tool
            expected.append(not heard)
            heard &= token != ASSISTANT
        assert row["completion_mask"] == expected
    assert len({len(row["completion_token_ids"]) for row in logged(folder)}) > 1
    assert failures(folder) == []


SAVES = {"environment_factory": game.Guess, "save_strategy": "steps", "save_steps": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(Folder, trainer) of a run with an environment of several turns."""
    folder = tmp_path_factory.mktemp("tools") / "whole"
    trainer = make(folder, **SAVES)
    trainer.train()
    return folder, trainer


def test_an_environment_of_several_turns_with_its_own_reward(whole):
    check(*whole)
    texts = [row["completion_text"].splitlines() for row in logged(whole[0])]
    call, answer, *_ = next(lines for lines in texts if lines[0].startswith("{"))
    assert json.loads(call)["name"] == "guess"
    assert answer.split()[0] in ("no", "yes")


def guess(number: int) -> str:
    """
    Guess the number.

    Args:
        number: From 1 to 7.

    Returns:
        The answer.
    """
    return game.answer(number, 4)


def said_yes(completions, **_):
    return [float(any(m["content"] == "yes" for m in episode)) for episode in completions]


def test_tools_with_a_reward_function(tmp_path):
    trainer = make(tmp_path, tools=[guess], reward_funcs=said_yes)
    trainer.train()
    check(tmp_path, trainer)


class Opposite(game.Guess):
    """Lies, and pays for that."""

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: From 1 to 7.

        Returns:
            The answer for another number.
        """
        super().guess(number)
        return game.answer(number, game.LARGEST + 1 - self.number)

    def get_reward(self) -> float:
        return 2.0 + super().get_reward()


def test_a_dict_of_environments_each_with_its_own_reward(tmp_path):
    rows = [
        {"prompt": PROMPT, "number": n % game.LARGEST + 1, "environment": ("true", "false")[n % 2]}
        for n in range(40)
    ]
    trainer = make(tmp_path, rows=rows, environment_factory={"true": game.Guess, "false": Opposite})
    trainer.train()
    check(tmp_path, trainer)
    groups = {}
    for row in logged(tmp_path):
        groups.setdefault(row["group_id"], set()).add(row["reward"])
    assert {max(each) <= 1.0 for each in groups.values()} == {True, False}
    assert all(max(each) <= 1.0 or min(each) >= 2.0 for each in groups.values())


class OwnsThePrompt(game.Guess):
    """Tells half of where the number is; `seed` is of the group, or of nobody."""

    def reset(self, seed=None, **_):
        super().reset(random.Random(seed).randint(1, game.LARGEST))
        return " no" if self.number < 4 else " yes"


def test_an_environment_that_draws_a_task_for_each_completion_is_refused_in_the_first_step(
    tmp_path,
):
    with pytest.raises(UsageError, match=r"8 completions of group \d have 2 different"):
        make(
            tmp_path / "a", rows=[{"prompt": PROMPT}] * 40, environment_factory=OwnsThePrompt
        ).train()
    seeded = [{"prompt": PROMPT, "seed": n} for n in range(40)]
    trainer = make(tmp_path / "b", rows=seeded, environment_factory=OwnsThePrompt)
    trainer.train()
    check(tmp_path / "b", trainer)


def rollouts_of_a_script(prompts, trainer):
    """One game for each prompt, played by nobody, with the answers masked."""
    tokenizer, rng = trainer.processing_class, random.Random(trainer.state.global_step)
    given = tokenizer("<user> guess <end> <assistant>")["input_ids"]
    games = [tokenizer(game.game(rng))["input_ids"][len(given) :] for _ in prompts]
    masks = []
    for tokens in games:
        heard, mask = False, []
        for token in tokens:
            heard |= token == TOOL
            mask.append(int(not heard))
            heard &= token != ASSISTANT
        masks.append(mask)
    return {
        "prompt_ids": [given] * len(prompts), "completion_ids": games, "env_mask": masks,
        "logprobs": [[-1.0] * len(each) for each in games],
        "won": [float(game.WORDS.index("yes") in each) for each in games],
    }  # fmt: skip


def test_a_rollout_func_with_a_mask_and_fields_for_the_reward(tmp_path):
    trainer = make(
        tmp_path, rollout_func=rollouts_of_a_script,
        reward_funcs=lambda won, **_: won,
    )  # fmt: skip
    trainer.train()
    check(tmp_path, trainer)
    assert set(logged(tmp_path)[0]["sampler_logprobs"]) == {-1.0}


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_episodes_killed_and_resumed_are_those_never_killed(tmp_path, whole):
    folder, never_killed = whole
    killed = make(tmp_path, **SAVES)
    killed.add_callback(Kill())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = make(tmp_path, **SAVES)
    resumed.train(resume_from_checkpoint=True)
    assert weights_of(resumed) == weights_of(never_killed)
    assert logged(tmp_path) == logged(folder)


@pytest.mark.slow
def test_the_example_improves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(tmp_path), "--steps", "20"])
    game.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "won " in line]
    first, second = (float(line.rpartition("won ")[2]) for line in lines)
    assert first + 0.1 < second
