"""No secret on disk; no hosts and local folders in what people share."""

import json
import logging
import sys

import pytest
from small_runs.trained import small_recipe, train_small_run

from grpo_replay.cli.error_boundary import report_error
from grpo_replay.cli.run_display import RunDisplay
from grpo_replay.errors import DataError, RecipeError
from grpo_replay.recipe import RewardSection, resolve_recipe
from grpo_replay.rewards.scorer import RewardScorer
from grpo_replay.storage.checkpoint import RunState
from grpo_replay.storage.run_directory import RunDirectory
from grpo_replay.terminal.console import open_console
from grpo_replay.terminal.quiet import warnings_on_stderr, without_secrets
from grpo_replay.training.run_evaluation import model_card

TOKEN = "hf_" + "aBcD1234" * 4
KEY = "correct horse battery"
PASSWORD = "pa55-w0rd"


@pytest.fixture
def planted(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("OTHER_API_KEY", KEY)
    url = f"http://me:{PASSWORD}@10.0.0.1:8000"
    monkeypatch.setattr(sys, "argv", ["grpo-replay", "train", "--set", f"x={url}", TOKEN, KEY])


def test_planted_secrets_are_in_no_file_of_a_run(planted, tmp_path):
    """In the environment, in arguments, printed and raised by a reward function, and logged."""
    reward = {"function": "judge_rewards:tells_secrets", "workers": 1}
    run = train_small_run(
        tmp_path / "run", reward=reward, run={"steps": 3}, eval={"benchmarks": []},
        checkpoint={"every_steps": 1},
    )  # fmt: skip
    try:
        raise ConnectionError(f"http://me:{PASSWORD}@10.0.0.1:8000 said {KEY}")
    except ConnectionError:
        logging.getLogger("grpo_replay").exception("as a library would")
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        content = path.read_bytes()
        for secret in (TOKEN, KEY, PASSWORD):
            assert secret.encode() not in content, path
    log = (run.path / "log/attempt_001.log").read_text()
    assert "key *** http://***@10.0.0.1/" in log
    assert "http://***@10.0.0.1:8000 said ***" in log
    command = json.loads((run.path / "environment.json").read_text())["command"]
    assert command == [
        "grpo-replay", "train", "--set", "x=http://***@10.0.0.1:8000", "***", "***"
    ]  # fmt: skip


def test_a_url_with_a_password_is_refused_and_not_repeated():
    urls = [f"http://me:{PASSWORD}@10.0.0.1:8000"]
    with pytest.raises(RecipeError, match="VLLM_API_KEY") as caught:
        resolve_recipe([{"sampling": {"servers": {"urls": urls}}}])
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("secret", [TOKEN, KEY, f"s3://me:{PASSWORD}@store/x"])
def test_a_recipe_with_a_secret_starts_no_run(planted, tmp_path, secret):
    recipe = small_recipe(prompts={"system_prompt": f"use {secret}"})
    with pytest.raises(RecipeError, match=r"prompts\.system_prompt") as caught:
        RunDirectory(tmp_path / "run").create(recipe)
    assert not (tmp_path / "run").exists()
    assert secret not in str(caught.value)


def test_the_screen_shows_no_secret(planted, tmp_path, capsys):
    """In the error of a reward function, in other errors, in notices and warnings."""
    own = RewardSection(function="judge_rewards:tells_secrets", workers=1)
    with RewardScorer.open(own) as scorer:
        scorer.score([("a completion", "5", {})])
        report_error(DataError(f"the reward function failed: {scorer.first_error}"))
    report_error(DataError(f"http://me:{PASSWORD}@10.0.0.1 said {KEY}"))
    report_error(RuntimeError(f"a bug with {TOKEN}"))
    RunDisplay(open_console(stderr=True)).on_notice(f"the key is {KEY}")
    with warnings_on_stderr():
        logging.getLogger("grpo_replay").warning("a warning of %s", KEY)
    seen = capsys.readouterr()
    shown = seen.out + seen.err
    assert shown.count("***") == 6
    for secret in (TOKEN, KEY, PASSWORD):
        assert secret not in shown


def test_ordinary_text_is_no_secret(monkeypatch):
    monkeypatch.setenv("SSH_KEY", "/home/me/.ssh/id")
    monkeypatch.setenv("EMPTY_TOKEN", "")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "definitely")
    for text in ("/home/me/.ssh/id", "http://10.0.0.1:8000/v1", "definitely", "me@example.org"):
        assert without_secrets(text) == text


def test_a_card_names_no_host_and_no_local_folder():
    recipe = small_recipe(
        model={"path": "/home/me/models/base"},
        sampling={"backend": "vllm_server", "servers": {"urls": ["http://node17.example:8000"]}},
    )
    card = model_card(recipe, RunState(step=3), (None, None))
    assert "/home/me" not in card and "node17" not in card
    assert "Post-trained from `base`" in card and "path: base" in card and "http://HOST" in card


def test_a_card_of_a_buffer_without_an_age_limit_names_none():
    recipe = small_recipe(replay={"max_age_steps": None})
    assert "None" not in model_card(recipe, RunState(step=3), (None, None))
