"""A reward that looks for a tag that the tokenizer calls special: what it sees, what is said."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from buffer_makers import make_rollout
from commands import run_eval, run_inspect
from fake_policy_server import EOS, OUTLINE, ZERO, FakePolicyServer
from fake_server import Answer
from small_runs.asynchronous import async_recipe, train_async_run
from small_runs.trained import small_recipe, train_small_run
from tagged_model import save_tagged
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from grpo_replay.engine.models import load_tokenizer
from grpo_replay.evaluation.evaluation_report import read_report
from grpo_replay.recipe import ModelSection
from grpo_replay.sampling.completion_text import CompletionText
from grpo_replay.training.run import sample_rows
from grpo_replay.training.silent_settings import notices_of_tags

FILE = Path(__file__).parents[1] / "support" / "tagged_model.py"
HAS_TAG = f"{FILE}:has_tag"
ANSWER, END_OF_ANSWER = 24, 25


@pytest.fixture(scope="module")
def tagged(tmp_path_factory) -> str:
    return str(save_tagged(tmp_path_factory.mktemp("tagged") / "model"))


def sections_of(model: str, special_tokens: str = "keep") -> dict:
    return {
        "model": {"path": model},
        "reward": {"function": HAS_TAG, "incorrect": 0.0, "special_tokens": special_tokens},
    }


@pytest.mark.parametrize(
    ("ids", "dropped", "kept"),
    [
        ([ANSWER, 7, END_OF_ANSWER, EOS], "2", "<answer>2</answer>"),
        ([7, END_OF_ANSWER], "2", "2</answer>"),
        ([EOS, 7, EOS], "2", "<eos>2"),
        ([], "", ""),
    ],
)
def test_the_text_has_the_tags_but_not_the_end_token(tagged, ids, dropped, kept):
    tokenizer = load_tokenizer(ModelSection(path=tagged))
    for special_tokens, expected in (("drop", dropped), ("keep", kept)):
        recipe = small_recipe(**sections_of(tagged, special_tokens))
        assert CompletionText.from_recipe(recipe, tokenizer).decode(ids) == expected
        assert (
            CompletionText.from_recipe(recipe, tokenizer).decode(np.array(ids, np.int32))
            == expected
        )


def test_spaces_before_punctuation_stay_as_the_model_wrote_them(tmp_path):
    """`x != y` is not `x!= y`, and " 's" is not "'s", whatever tokenizer_config.json says."""
    words = ["<unk>", "<eos>", "▁x", "▁!", "=", "▁y", "▁'s", "▁,", "▁.", "▁n't"]
    backend = Tokenizer(Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.pre_tokenizer, backend.decoder = Metaspace(), MetaspaceDecoder()
    special = {"unk_token": "<unk>", "eos_token": "<eos>"}
    cleaning = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=True, **special
    )
    cleaning.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = load_tokenizer(ModelSection(path=str(tmp_path)))
    assert tokenizer.decode([2, 3, 4, 5]) == "x!= y"
    assert CompletionText(tokenizer).decode([2, 3, 4, 5, 6, 7, 8, 9, 1]) == "x != y 's , . n't"
    assert CompletionText(tokenizer, kept=True).decode([2, 3, 4]) == "x !="
    rollout = replace(make_rollout(1), prompt_token_ids=np.array([2, 3, 4, 5], np.int32))
    assert [row["prompt"] for row in sample_rows([rollout], 1, tokenizer)] == ["x != y"]


def test_a_run_learns_to_write_a_tag_and_is_evaluated_and_shown_with_it(
    tagged, tmp_path, processes, capsys
):
    whole = {"benchmarks": ["tiny"], "max_problems": 4, "samples": 2, "temperature": 1.0,
             "reward": HAS_TAG}  # fmt: skip
    run = train_small_run(tmp_path / "run", **sections_of(tagged), eval=whole, run={"steps": 12})
    rewards = [line["reward"] for line in run.metrics]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    first, last = (read_report(run.path / f"eval/step_{s:06d}.json") for s in (0, 12))
    assert last.accuracies()["mean"] > first.accuracies()["mean"] + 0.2
    assert last.settings["special_tokens"] == "keep"
    row = next(each for each in run.rollouts(12) if "</answer>" in each["completion_text"])
    assert run_inspect(str(run.path), show=row["rollout_id"]) == 0
    screen = capsys.readouterr().out
    assert "completion, as the reward saw it" in screen and "</answer>" in screen
    assert screen.count("</answer>") == 2 * row["completion_text"].count("</answer>")
    assert run_eval(str(run.path), output=str(tmp_path / "e.json"), overrides=()) == 0
    assert read_report(tmp_path / "e.json").accuracies()["mean"] == last.accuracies()["mean"]


def test_without_them_the_reward_is_0_for_ever_and_show_has_both_texts(
    tagged, tmp_path, processes, capsys
):
    run = train_small_run(tmp_path / "run", **sections_of(tagged, "drop"), run={"steps": 3})
    assert {row["reward"] for row in run.all_rollouts.values()} == {0.0}
    rows = run.all_rollouts.values()
    row = next(each for each in rows if END_OF_ANSWER in each["completion_token_ids"][:-1])
    assert "<" not in row["completion_text"]
    assert run_inspect(str(run.path), show=row["rollout_id"]) == 0
    seen, _, written = capsys.readouterr().out.partition("completion, as it was written")
    assert "</answer>" not in seen and "</answer>" in written


def test_a_reward_function_may_take_the_token_ids(tagged, tmp_path, processes):
    sections = sections_of(tagged, "drop")
    sections["reward"]["function"] = [f"{FILE}:has_tag_id", f"{FILE}:lengths"]
    run = train_small_run(tmp_path / "run", **sections, run={"steps": 3})
    for row in run.all_rollouts.values():
        ids = row["completion_token_ids"]
        assert row["reward_scores"] == [float(END_OF_ANSWER in ids), len(ids)]


class _Tags(FakePolicyServer):
    def sample(self, body: dict) -> Answer:
        given = super().sample(body)
        tokens = [ANSWER, *given.tokens[:-1], EOS]
        if given.tokens[0] >= ZERO + 5:
            tokens.insert(-1, END_OF_ANSWER)
        return Answer(tokens, [self.logprob] * len(tokens), given.labels[:1] * len(tokens))


@pytest.mark.slow
def test_in_asynchronous_runs_the_reward_sees_them_too(tagged, tmp_path, processes):
    server = _Tags(seconds=0.03)
    server.outline = OUTLINE.replace("=24", "=26")
    recipe = async_recipe([server.url], {**sections_of(tagged), "run": {"steps": 3}})
    run = train_async_run(recipe, tmp_path / "run")
    server.stop()
    rows = list(run.all_rollouts.values())
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    for row in rows:
        assert row["reward"] == float(row["completion_text"].endswith("</answer>"))


def test_a_notice_names_the_tags_that_a_function_or_the_prompt_asks_for(tagged):
    tokenizer = load_tokenizer(ModelSection(path=tagged))

    def said(special_tokens: str = "drop", **sections) -> list[str]:
        return notices_of_tags(
            small_recipe(**{**sections_of(tagged, special_tokens), **sections}), tokenizer
        )

    (notice,) = said()
    assert "has_tag may look for <answer>, </answer>, but" in notice and notice.endswith("keep")
    assert said("keep") == []
    assert said(reward={"function": "boxed"}) == []
    elsewhere = {"function": "judge_rewards:only_even"}
    assert said(reward=elsewhere) == []
    asked = {"user_template": "{problem} in <answer> tags="}
    (notice,) = said(reward=elsewhere, prompts=asked)
    assert "only_even may look for <answer>, but" in notice
    evaluated = {"benchmarks": ["tiny"], "reward": HAS_TAG}
    assert len(said(reward={"function": "boxed"}, eval=evaluated)) == 1
    plain = load_tokenizer(ModelSection())
    assert notices_of_tags(small_recipe(reward={"function": HAS_TAG}), plain) == []
