"""Settings without effect, and prompts that begin otherwise than the model expects, are said."""

import json
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from grpo_replay.lab.dry_run.dry_run_report import dry_run
from grpo_replay.recipe import load_recipe, recipe_to_yaml, resolve_recipe
from grpo_replay.shipped_recipes import shipped_recipes
from grpo_replay.tiny import BASE_DIR


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["replay.preset=grpo", "replay.ratio=0.5", "replay.max_age_steps=3"],
            ["replay.ratio with replay.preset grpo"],
        ),
        (
            ["loss.kind=asymre", "loss.epsilon=0.1", "loss.aggregation=constant"],
            ["loss.epsilon with loss.kind asymre"],
        ),
        (
            ["sampling.vllm.dtype=bfloat16", "sampling.vllm.hf_overrides={head_dtype: float32}"],
            ["sampling.vllm.dtype with sampling.backend hf"],
        ),
        (
            ["eval.benchmarks=[]", "eval.every_steps=3", "eval.temperature=0"],
            ["eval.every_steps with eval.benchmarks []"],
        ),
        (["replay.preset=grpo"], []),  # the baseline of a recipe
        (["loss.kind=asymre"], []),
        (["eval.benchmarks=[]"], []),
        (["sampling.backend=vllm", "sampling.vllm.dtype=bfloat16"], []),
        (["replay.preset=uniform", "replay.ratio=0.5", "loss.epsilon=0.1"], []),
    ],
)
def test_keys_that_are_given_where_another_one_switches_them_off(overrides, expected, tmp_path):
    recipe = load_recipe("tiny", overrides)
    assert recipe.idle_settings == expected
    saved = tmp_path / "recipe.yaml"
    saved.write_text(recipe_to_yaml(recipe))
    assert load_recipe(str(saved)).idle_settings == [], "a resolved recipe has every key"
    assert load_recipe(str(saved)) == recipe
    again = load_recipe(str(saved), overrides).idle_settings
    assert again == expected, "they are given again"


def test_a_recipe_that_gives_both_itself_and_the_shipped_ones():
    layer = {"replay": {"preset": "grpo", "ratio": 1.0}}
    assert resolve_recipe([layer]).idle_settings == ["replay.ratio with replay.preset grpo"]
    assert {name: load_recipe(name).idle_settings for name in shipped_recipes()} == {
        name: [] for name in shipped_recipes()
    }


def test_numbers_are_as_yaml_1_2_has_them():
    assert load_recipe("tiny", ["run.steps=0250"]).run.steps == 250


def rows(tmp_path: Path) -> list[str]:
    problems = [{"problem": f"{n}+1", "answer": str(n + 1)} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in problems))
    return [f"prompts.source={tmp_path}/rows.jsonl", "prompts.id_field=null", "engine.device=cpu",
            "eval.benchmarks=[]", "reward.workers=1", "prompts.system_prompt=null"]  # fmt: skip


def tokenizer_with_bos(folder: Path, template: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(BASE_DIR)
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


MESSAGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "user", "said"),
    [
        (MESSAGES, "{problem}=", "prompts begin without <unk>, which"),
        ("{{ bos_token }}" + MESSAGES, "{problem}=", None),
        ("plain", "<unk>{problem}=", "prompts begin with <unk> twice"),
        ("plain", "{problem}=", None),
    ],
)
def test_a_bos_that_is_left_out_or_written_twice(tmp_path, template, user, said):
    folder = tokenizer_with_bos(tmp_path / "tokenizer", template)
    kind = "plain" if template == "plain" else "chat"
    keys = [f"model.tokenizer={folder}", f"prompts.template={kind}",
            f"prompts.user_template='{user}'"]  # fmt: skip
    report = dry_run(load_recipe("tiny", [*rows(tmp_path), *keys]))
    assert report["problems"] == []
    found = [each["text"] for each in report["notices"] if "prompts begin" in each["text"]]
    assert [each[: len(said or "")] for each in found] == ([said] if said else [])


def test_a_dry_run_says_what_has_no_effect(tmp_path):
    words = ["replay.preset=grpo", "replay.ratio=2", "reward.function=minerva"]
    report = dry_run(load_recipe("tiny", [*rows(tmp_path), *words]))
    text = "replay.ratio with replay.preset grpo has no effect"
    assert {"key": "recipe", "text": text} in report["notices"]
