"""Whole runs with rewards and data of a user: several functions, message lists, GSM8K's answers,
functions that fail, and rows on which nothing can be learnt."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_runs.trained import Listener, small_recipe, train_small_run

from grpo_replay.errors import DatasetError, RecipeError
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.lab.verification.verify import verify_run
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.tiny import BASE_DIR
from grpo_replay.tiny.problems import train_problems
from grpo_replay.training.run import run_training

FILE = Path(__file__).parents[1] / "support" / "judge_rewards_file.py"
PLAIN = {"template": "plain", "user_template": "{problem}=", "max_prompt_length": 16}
NAMES = ("boxed_is_right", "short", "overlong")


def write_rows(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def chat_model(tmp_path):
    """The tiny base with a chat template that writes what the user asks."""
    folder = shutil.copytree(BASE_DIR, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}=")
    return str(folder)


@pytest.fixture
def verl_rows(tmp_path):
    """Tiny problems in the form of verl's data preprocessing."""
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": row["problem"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(train_problems(0)[:64])
    ]
    return write_rows(tmp_path / "verl.jsonl", rows)


@pytest.mark.slow
def test_two_weighted_rewards_on_message_lists_train_evaluate_and_verify(
    tmp_path, chat_model, verl_rows, processes
):
    other = {"function": f"{FILE}:shortness", "weight": 0.5, "name": "short"}
    run = train_small_run(
        tmp_path / "run",
        model={"path": chat_model},
        prompts={"source": verl_rows, "template": "chat", "id_field": "extra_info.index"},
        reward={
            "function": [f"{FILE}:boxed_is_right", other], "incorrect": 0.0,
            "overlong_buffer_tokens": 6, "mask_truncated": True,
        },
        sampling={"max_completion_length": 12},
        run={"steps": 4},
        eval={
            "benchmarks": [verl_rows], "samples": 1, "max_problems": 32, "at_start": False,
            "max_completion_length": 16, "reward": f"{FILE}:boxed_is_right",
        },
    )  # fmt: skip
    rows = run.rollouts(1)
    scores = np.array([row["reward_scores"] for row in rows])
    lengths = np.array([len(row["completion_token_ids"]) for row in rows])
    np.testing.assert_allclose(
        scores[:, 1], [-len(row["completion_text"]) / 100 for row in rows], rtol=1e-6
    )
    np.testing.assert_allclose(scores[:, 2], np.clip((12 - 6 - lengths) / 6, -1, 0), rtol=1e-6)
    np.testing.assert_allclose([row["reward"] for row in rows], scores @ [1, 0.5, 1], rtol=1e-6)
    line = run.metrics[0]
    for index, name in enumerate(NAMES):
        assert line[f"rewards/{name}/mean"] == pytest.approx(scores[:, index].mean())
        assert line[f"rewards/{name}/std"] == pytest.approx(scores[:, index].std())
    assert 0 < line["rewards/boxed_is_right/mean"] < 1
    assert sum(each["fresh/rollouts"] for each in run.metrics) > 0
    cut_off = [row for row in run.all_rollouts.values() if row["finish_reason"] == "length"]
    assert cut_off and not any(row["kept"] for row in cut_off)
    report = read_report(run.path / "eval" / "step_000004.json")
    answers, texts, verdicts = (
        report.samples[name].to_pylist() for name in ("answer", "completion_text", "verdict")
    )
    right = [f"{{{answer}}}" in text for answer, text in zip(answers, texts, strict=True)]
    assert [verdict == "correct" for verdict in verdicts] == right and 0 < sum(right) < 32
    assert verify_run(run.path).passed


GSM8K_ROWS = [
    {
        "question": f"Ada has {n} pens and buys {n} more. How many pens has she now?",
        "answer": f"Ada has {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n:,} pens now.\n#### {2 * n:,}",
    }
    for n in range(495, 515)
]
"""Rows of our own in the form of GSM8K."""


def test_answers_as_in_gsm8k_are_graded_by_the_default_reward(tmp_path, monkeypatch, processes):
    """The model knows no letters, so every second completion is replaced by a right one."""
    submitted = []
    original = RewardScorer.submit

    def half_right(self, key, request):
        if isinstance(key, tuple) and key.completion_index % 2 == 0:
            submitted.append(request.answer)
            answer = request.answer.replace(",", "")
            request = replace(request, text=f"so \\boxed{{{answer}}}")
        original(self, key, request)

    monkeypatch.setattr(RewardScorer, "submit", half_right)
    recipe = small_recipe(
        model={"tokenizer": "builtin:bytes",
               "random_init": {"vocab_size": 258, "max_position_embeddings": 256}},
        prompts={"source": write_rows(tmp_path / "gsm8k.jsonl", GSM8K_ROWS), "id_field": None,
                 "problem_field": "question", "max_prompt_length": 100,
                 "user_template": "{problem}"},
        replay={"preset": "grpo"},
        run={"steps": 1},
    )  # fmt: skip
    listener = Listener()
    run_training(recipe, tmp_path / "run", False, listener)
    assert any("20 of 20 answers contain '####'" in notice for notice in listener.at_start)
    (line,) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert line["verdict/correct"] == len(submitted) == 12 and line["reward"] == 0
    assert line["fresh/rollouts"] == 24 and line["updates"] > 0
    assert set(submitted) <= {f"{2 * n:,}" for n in range(495, 515)}


@pytest.mark.parametrize("wrong", ["answers", "function"])
def test_rewards_that_cannot_come_end_the_run_before_it_loads_a_model(tmp_path, processes, wrong):
    if wrong == "answers":
        rows = [{"problem": f"{n}+1", "answer": "word " * 200} for n in range(20)]
        source = write_rows(tmp_path / "rows.jsonl", rows)
        sections = {"prompts": {"source": source, "id_field": None, **PLAIN}}
        error = pytest.raises(DatasetError, match="none of 20 reference answers")
    else:
        sections = {"reward": {"function": f"{FILE}:raises"}}
        error = pytest.raises(RecipeError, match="KeyError: 'no such field'")
    with error:
        train_small_run(tmp_path / "run", **sections)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_an_error_on_another_rank_than_0_reaches_the_screen(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os\n\n"
        "def score(completion, step):\n"
        "    if step is not None and os.environ['RANK'] == '1':\n"
        "        raise ValueError('only there')\n"
        "    return float(len(completion))\n"
    )
    keys = ["run.steps=1", "replay.preset=grpo", "eval.benchmarks=[]", "engine.device=cpu",
            "reward.workers=1",
            f"reward.function={tmp_path}/own.py:score", "reward.max_failed_share=0.4"]  # fmt: skip
    words = [word for key in keys for word in ("--set", key)]
    done = subprocess.run(
        [sys.executable, "-m", "grpo_replay", "train", "tiny", "--num-processes", "2",
         "--output-dir", str(tmp_path / "run"), *words],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "First error: ValueError: only there" in done.stderr
